"""Expectations of a message: as they are logged, and with the proof of the leader."""

import msgspec

from contrail_common.model import Expected
from contrail_common.subjects import is_wildcard


class HashedExpected(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """Expectations of one message (``contrail_common.model.Expected``), its id hashed.

    The leader adds a proof where the subject table does not show the last sequence. For a wildcard:
    when ``as_of`` was the last sequence of the shard, ``newest`` was its last message on a matching
    subject (0: none). For a subject: when ``as_of`` was its newest message ever stored, ``newest``
    was the newest one that was left. Without a proof, ``as_of`` is None.
    """

    stream: str | None = None
    last_seq: int | None = None
    last_subject_seq: int | None = None
    last_subject_seq_subject: str | None = None
    last_id: bytes | None = None
    as_of: int | None = None
    newest: int = 0


class ProvenExpected(Expected, frozen=True, kw_only=True):
    """Expectations with a proof about the last sequence: see `HashedExpected`."""

    as_of: int
    newest: int


def subject_of(expected: Expected, subject: str) -> str | None:
    """The subject or wildcard whose last sequence a message on ``subject`` expects, if any."""
    if expected.last_subject_seq is None:
        return None
    return expected.last_subject_seq_subject or subject


def wildcard_of(expected: HashedExpected) -> str | None:
    """The wildcard whose last sequence is expected; None if there is none."""
    pattern = expected.last_subject_seq_subject
    if expected.last_subject_seq is None or pattern is None or not is_wildcard(pattern):
        return None
    return pattern
