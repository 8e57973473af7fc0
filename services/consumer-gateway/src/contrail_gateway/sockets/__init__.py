"""WebSockets: their codec, their session, and the feeds of their subscriptions."""
