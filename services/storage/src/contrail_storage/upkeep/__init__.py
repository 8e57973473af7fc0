"""Work beside requests: age, checkpoints, disk space, erasures, the scrub."""
