"""`contrail pipeline erase`: removes messages from a lake, and proves it."""
