"""Forwarding: requests that another kind of process serves, and their answers."""
