"""Reading messages: one by one, by subject and time, and in bulk."""
