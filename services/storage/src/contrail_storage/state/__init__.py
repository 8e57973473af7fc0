"""The whole state of a group, from its leader to a member that cannot catch up from the log."""
