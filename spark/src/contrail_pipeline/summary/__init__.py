"""`contrail pipeline summary`: the content of a stream in figures, and a report of them."""
