# Generated from aio/__init__.py by `make blocking`. Change that file, not this one.
"""The blocking client."""
