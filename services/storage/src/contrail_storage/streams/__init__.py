"""Streams of a node: made, changed, removed, archived and restored, on one shard or several."""
