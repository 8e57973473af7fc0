"""The `contrail` command line."""
