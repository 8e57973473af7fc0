"""Archives of streams: the bytes, and whether they describe a stream."""
