"""The deterministic heart: state machines without clock, IO, threads or randomness.

Rules of this package: time is an argument, ``apply`` answers and never raises, state changes leave
as rows to write, and the same entries give the same state on every replica.
"""
