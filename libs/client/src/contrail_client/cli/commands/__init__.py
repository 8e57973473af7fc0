"""The commands of `contrail`, one module for each group."""
