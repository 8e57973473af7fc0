"""The deterministic state machines: no clock, no IO, no threads, no randomness.

Rules of this package: time is an argument, ``apply`` returns a result and never raises, state
changes are returned as rows to write, and the same entries give the same state on every replica.
"""
