"""Subjects and subject filters: validation, wildcard matching, overlap and containment.

A subject is one or more tokens joined by ``.``; a token is one or more characters without white
space. In a filter ``*`` stands for exactly one token and ``>``, as the last token, for one or more.
The rules are JetStream's.
"""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from contrail_common.subject_tree import SubjectTree

SUBJECT_BYTES_MAX: Final = 4096
RESERVED_PREFIX: Final = "$CONTRAIL"
"""First token of the subjects that the platform itself writes; no stream may capture them."""


def _token_problem(text: str, what: str) -> str | None:
    if not text:
        return f"{what} must not be empty"
    # This check comes first: lone surrogates are not printable, and `encode` below would raise for
    # them. The space is the only white space that is printable.
    if not text.isprintable() or " " in text:
        return f"{what} must not contain white space or control characters"
    if len(text.encode()) > SUBJECT_BYTES_MAX:
        return f"{what} must not be longer than {SUBJECT_BYTES_MAX} bytes"
    if text[0] == "." or text[-1] == "." or ".." in text:
        return f"{what} must not contain an empty token"
    return None


def subject_problem(subject: str) -> str | None:
    """Return why ``subject`` cannot be published to, or None if it can."""
    if len(subject) > SUBJECT_BYTES_MAX:  # keep long texts out of the cache
        return f"a subject must not be longer than {SUBJECT_BYTES_MAX} bytes"
    return _short_subject_problem(subject)


def any_subject_problem(subjects: Collection[str]) -> bool:
    """Return True if some of the ``subjects`` cannot be published to."""
    # Without a call in Python for each: a batch has many, mostly those of the batch before.
    if max(map(len, subjects), default=0) > SUBJECT_BYTES_MAX:
        return True
    return any(map(_short_subject_problem, subjects))


@functools.lru_cache(maxsize=65_536)
def _short_subject_problem(subject: str) -> str | None:
    # Most subjects have only these characters, and then need no look at each token.
    letters = subject.replace(".", "").replace("-", "").replace("_", "")
    plain = letters.isascii() and letters.isalnum()
    if plain and ".." not in subject and subject[0] != "." != subject[-1]:
        return None
    problem = _token_problem(subject, "a subject")
    if problem is None and is_wildcard(subject):
        return "a subject must not contain the wildcards * and > as tokens"
    return problem


def filter_problem(pattern: str) -> str | None:
    """Return why ``pattern`` is not a valid subject filter, or None if it is one."""
    problem = _token_problem(pattern, "a subject filter")
    if problem is None and ">" in pattern.split(".")[:-1]:
        return "the wildcard > must be the last token of a filter"
    return problem


def is_wildcard(pattern: str) -> bool:
    """Return True if ``pattern`` has a wildcard token; ``a*`` and ``>b`` are ordinary tokens."""
    if "*" not in pattern and ">" not in pattern:
        return False
    tokens = pattern.split(".")
    return "*" in tokens or tokens[-1] == ">"


def matches(pattern: str, subject: str) -> bool:
    """Return True if the filter ``pattern`` matches the literal ``subject``."""
    if pattern in (">", subject):
        return True
    if not is_wildcard(pattern):
        return False
    return _tokens_contain(pattern.split("."), subject.split("."))


def matches_any(patterns: tuple[str, ...], subject: str) -> bool:
    """Return True if one of ``patterns`` matches, or if there are none."""
    return not patterns or any(matches(pattern, subject) for pattern in patterns)


def contains(outer: str, inner: str) -> bool:
    """Return True if ``outer`` matches every subject that ``inner`` matches."""
    return _tokens_contain(outer.split("."), inner.split("."))


def _tokens_contain(outer: list[str], inner: list[str]) -> bool:
    for position, token in enumerate(outer):
        if token == ">":
            return len(inner) > position
        if position >= len(inner):
            return False
        other = inner[position]
        if other == ">" or token not in ("*", other):
            return False
    return len(outer) == len(inner)


def overlaps(left: str, right: str) -> bool:
    """Return True if both filters match some subject."""
    left_tokens, right_tokens = left.split("."), right.split(".")
    for a, b in zip(left_tokens, right_tokens, strict=False):
        if ">" in (a, b):
            return True
        if a != b and "*" not in (a, b):
            return False
    return len(left_tokens) == len(right_tokens)


def overlapping_pairs(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs of valid filters that overlap, in the order of ``patterns``."""
    tree: SubjectTree[int] = SubjectTree()
    for position, pattern in enumerate(patterns):
        tree.add(pattern, position)
    for position, pattern in enumerate(patterns):
        for other in sorted(tree.overlapping(pattern)):
            if other > position:
                yield pattern, patterns[other]
