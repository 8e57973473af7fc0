"""What requests say, checked: paths, queries, headers, JSON bodies and messages."""
