"""Small files of a node, each replaced whole, and the lock of its folder."""
