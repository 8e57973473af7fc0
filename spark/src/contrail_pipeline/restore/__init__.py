"""`contrail pipeline restore`: replays a lake into a stream."""
