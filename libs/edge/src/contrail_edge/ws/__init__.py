"""WebSocket connections: the handshake, frames, deadlines and figures of them."""
