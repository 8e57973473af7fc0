"""Deterministic simulation of whole nodes: one seed gives one history, in virtual time."""
