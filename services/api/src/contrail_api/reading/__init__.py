"""Reading messages: single, in order, as lists, as replays, and events."""
