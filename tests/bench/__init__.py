"""Benchmarks of the running service beside the machine's limits and other servers.

``python -m tests.bench`` starts real servers as child processes, drives them from a process of its
own, and compares every figure with what the same machine did in the same run.
"""
