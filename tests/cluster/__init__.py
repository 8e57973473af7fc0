"""Real server processes under load from many clients, killed and started again."""
