"""Consumers of a node: made, changed, removed, and what they are given."""
