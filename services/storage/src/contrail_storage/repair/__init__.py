"""Opening a damaged folder with what reads back, and a failed store again."""
