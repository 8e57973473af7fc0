"""Requests, answers, their limits and refusals: what HTTP itself needs."""
