"""Encryption at rest: node keys, data keys, sealed bytes."""
