"""Live traffic over one WebSocket: publishers and subscriptions that survive its loss."""
