"""Work beside requests: age, checkpoints, room on the disk, erasures, the scrub."""
