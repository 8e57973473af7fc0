"""Forwarding: what another kind of process serves is asked of one, and its answer passed on."""
