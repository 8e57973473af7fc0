"""The state of the cluster."""
