"""Profiles of the property tests: quick by default, thorough by HYPOTHESIS_PROFILE=thorough."""

import os

from hypothesis import HealthCheck, settings

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}

settings.register_profile("quick", max_examples=60, stateful_step_count=30, database=None, **COMMON)
settings.register_profile("thorough", max_examples=500, stateful_step_count=80, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
