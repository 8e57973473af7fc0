"""The store of a node: rows, blocks and files other than the log."""
