"""The storage node: machines, log, store and readers wired on one event loop."""
