"""The operations of the API as calls: pure functions that build requests and read answers."""
