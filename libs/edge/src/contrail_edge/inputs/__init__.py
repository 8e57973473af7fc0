"""Parsing and checking requests: paths, queries, headers, JSON bodies and messages."""
