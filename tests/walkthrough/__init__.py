"""One publish and one delivery of a running server, shown hop by hop."""
