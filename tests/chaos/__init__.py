"""Random faults for a cluster of real processes under load, and checks of what it promised.

``make chaos MINUTES=10``, or ``python -m tests.chaos --minutes 10 --seed 7``.
"""
