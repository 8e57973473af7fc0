"""`contrail pipeline archive`: copies a stream to a lake."""
