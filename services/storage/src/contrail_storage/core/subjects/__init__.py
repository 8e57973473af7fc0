"""Subjects of a stream shard: names, numbers, filters."""
