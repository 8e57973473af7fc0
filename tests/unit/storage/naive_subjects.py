"""Filters of subjects as plainly as they can be compared: token by token."""

import itertools


def naive_matches(pattern: str, subject: str) -> bool:
    """Whether a filter matches a literal subject, token by token."""
    return _tokens_match(pattern.split("."), subject.split("."))


def _tokens_match(pattern: list[str], subject: list[str]) -> bool:
    if pattern == [">"]:
        return len(subject) > 0
    if not pattern or not subject:
        return pattern == subject
    return pattern[0] in ("*", subject[0]) and _tokens_match(pattern[1:], subject[1:])


def naive_collides(left: tuple[str, ...], right: tuple[str, ...]) -> bool:
    """Whether some subject of up to three tokens is matched by both lists of filters."""
    tokens = ["a", "b", "x", "y", "other"]
    return any(
        any(naive_matches(one, ".".join(subject)) for one in left or (">",))
        and any(naive_matches(one, ".".join(subject)) for one in right or (">",))
        for length in (1, 2, 3)
        for subject in itertools.product(tokens, repeat=length)
    )
