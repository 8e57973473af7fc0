"""One publish and one delivery of a running server, told hop by hop."""
