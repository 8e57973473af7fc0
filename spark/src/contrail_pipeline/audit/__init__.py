"""`contrail pipeline audit`: reads all of a stream, and compares it with what should be there."""
