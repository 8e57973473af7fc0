"""Benchmarks of the running service, compared with the machine's limits and with other servers.

``python -m tests.bench`` starts real servers as child processes and loads them from another
process. It compares every figure with figures of the same machine in the same run.
"""
