"""`contrail pipeline transform`: a streaming query from a file of SQL, and its supervision."""
