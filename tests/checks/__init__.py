"""Checks of the repository itself: each takes files and returns the problems that it finds."""
