"""Consumers: configuration and progress."""
