"""The storage link: what the services ask of a storage node, in this process or over TCP."""
