"""`contrail pipeline compact`: merges small files of a lake."""
