"""Removing messages: by limits, by subject, by purge, and when no consumer needs them."""
