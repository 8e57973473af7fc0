"""Checks of the repository's own text: each takes files and returns the problems it finds."""
