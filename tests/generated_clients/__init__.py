"""Clients made from the OpenAPI document by six generators, each run against a server."""
