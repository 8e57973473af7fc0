"""Groups of subjects, as filters with wildcards. Pure."""

from collections.abc import Sequence
from typing import Final

TOKENS_MAX: Final = 16
"""Tokens that are looked at; longer subjects end with `>`."""
PATTERNS_MAX: Final = 40
"""At most about so many groups: Spark estimates how many there would be."""


def wildcard_order(distinct: Sequence[int]) -> list[int]:
    """The positions of tokens in the order in which a wildcard replaces them.

    ``distinct`` is the number of different tokens at each position. The most varied position goes
    first: it is an id, such as that of a customer, and says least about a group.
    """
    varied = [at for at, number in enumerate(distinct) if number > 1]
    return sorted(varied, key=lambda at: (-distinct[at], -at))


def fewest_wildcards(groups: Sequence[int], limit: int) -> int:
    """The least number of wildcards for at most ``limit`` groups.

    ``groups`` has the number of groups with no wildcard, with one, and so on.
    """
    return next((at for at, number in enumerate(groups) if number <= limit), len(groups) - 1)


def pattern_of(subject: str, wild: Sequence[int]) -> str:
    """The filter of the group to which a subject belongs."""
    tokens = subject.split(".")
    shown = ["*" if at in wild else token for at, token in enumerate(tokens[:TOKENS_MAX])]
    return ".".join([*shown, ">"] if len(tokens) > TOKENS_MAX else shown)
