"""Expectations of a message: as they are logged, and with the proof of the leader."""

import msgspec

from contrail_common.model import Expected
from contrail_common.subjects import is_wildcard


class HashedExpected(msgspec.Struct, array_like=True, frozen=True, omit_defaults=True):
    """Expectations of one message (``contrail_common.model.Expected``), its id hashed.

    An expectation about a wildcard has a proof, which the leader found: when ``as_of`` was the last
    sequence of the shard, ``newest`` was its last message on a matching subject (0: none). Earlier
    versions logged no proof (``as_of`` is None).
    """

    stream: str | None = None
    last_seq: int | None = None
    last_subject_seq: int | None = None
    last_subject_seq_subject: str | None = None
    last_id: bytes | None = None
    as_of: int | None = None
    newest: int = 0


class ProvenExpected(Expected, frozen=True, kw_only=True):
    """Expectations with a proof about their wildcard: see `HashedExpected`."""

    as_of: int
    newest: int


def wildcard_of(expected: Expected | HashedExpected) -> str | None:
    """The wildcard whose last sequence is expected; None if there is none."""
    pattern = expected.last_subject_seq_subject
    if expected.last_subject_seq is None or pattern is None or not is_wildcard(pattern):
        return None
    return pattern
