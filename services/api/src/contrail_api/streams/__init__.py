"""Streams: configuration, state, snapshots, erasures."""
