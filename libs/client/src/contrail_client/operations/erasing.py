"""Calls that erase messages and ask for receipts."""

from collections.abc import Sequence

from contrail_client.calls import Call, call, given, json_as, path_of
from contrail_client.models import Erasure

_erasure = json_as(Erasure)


def erase(
    stream: str,
    *,
    seqs: Sequence[int] | int | None,
    subject: str | None,
    shard: int | None,
    wait_s: float,
) -> Call[Erasure]:
    """Erase messages by sequence or subject; the answer comes when done, or after `wait_s`."""
    if isinstance(seqs, int):
        seqs = (seqs,)
    body = given(seqs=None if seqs is None else list(seqs), subject=subject, shard=shard)
    path = path_of("streams", stream, "erase")
    return call("POST", path, _erasure, json=body, query=_wait(wait_s), wait_s=wait_s)


def erasure(erasure_id: str, *, wait_s: float) -> Call[Erasure]:
    """The receipt of an erasure; the answer comes when it is done, or after `wait_s`."""
    path = path_of("erasures", erasure_id)
    return call("GET", path, _erasure, query=_wait(wait_s), wait_s=wait_s)


def _wait(wait_s: float) -> dict[str, str | None]:
    return {"wait": f"{round(wait_s * 1000)}ms" if wait_s else None}
