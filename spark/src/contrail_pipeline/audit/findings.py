"""What an audit finds: one sentence each, and the sequences that it is about."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np

from contrail_pipeline.audit.digest import I64Array

NAMED_MAX: Final = 10
"""Findings of one kind that are named in a range; of the others only the number is given."""
_PLURAL: Final = {"is": "are", "has": "have", "comes": "come"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    ``kind`` is for machines. ``source`` is what was read: ``stream``, ``lake``, or the name of a
    node. ``shard`` and the sequences are None if the finding is about more.
    """

    kind: str
    message: str
    source: str = "stream"
    shard: int | None = None
    from_seq: int | None = None
    to_seq: int | None = None

    def document(self) -> dict[str, Any]:
        """The finding as JSON."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {"finding": known.pop("kind")} | known


@dataclass(slots=True)
class Findings:
    """Collects findings about a shard, at most ``NAMED_MAX`` of a kind by name."""

    source: str
    shard: int
    found: list[Finding] = field(default_factory=list)
    more: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, text: str, from_seq: int, to_seq: int | None = None) -> None:
        """Add a finding about a run of sequences; ``text`` continues their name."""
        if sum(one.kind == kind for one in self.found) >= NAMED_MAX:
            self.more[kind] = self.more.get(kind, 0) + 1
            return
        to_seq = from_seq if to_seq is None else to_seq
        if from_seq < to_seq:
            verb, space, rest = text.partition(" ")
            text = f"{_PLURAL.get(verb, verb)}{space}{rest}"
        message = f"{named(self.shard, from_seq, to_seq)} {text}"
        self.found.append(Finding(kind, message, self.source, self.shard, from_seq, to_seq))

    def all(self) -> list[Finding]:
        """All findings, with one for the rest of each kind."""
        rest = [
            Finding(kind, f"shard {self.shard}: {more:,} more like this", self.source, self.shard)
            for kind, more in self.more.items()
        ]
        return [*self.found, *rest]


def named(shard: int, from_seq: int, to_seq: int) -> str:
    """How a run of sequences is called."""
    if from_seq == to_seq:
        return f"shard {shard} sequence {from_seq}"
    return f"shard {shard} sequences {from_seq}..{to_seq}"


def runs_of(seqs: I64Array) -> Iterator[tuple[int, int]]:
    """Ascending sequences as runs of consecutive ones."""
    if len(seqs):
        borders = np.flatnonzero(np.diff(seqs) != 1) + 1
        for run in np.split(seqs, borders):
            yield int(run[0]), int(run[-1])


def without(
    runs: Iterable[tuple[int, int]], known: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The parts of ``runs`` that are not in ``known``; both ascend and do not overlap."""
    rest = iter(known)
    current = next(rest, None)
    for first, last in runs:
        low = first
        while low <= last:
            while current is not None and current[1] < low:
                current = next(rest, None)
            if current is None or current[0] > last:
                yield low, last
                break
            if current[0] > low:
                yield low, current[0] - 1
            low = current[1] + 1


def common(
    runs: Iterable[tuple[int, int]], known: list[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The parts of ``runs`` that are in ``known`` too; both ascend and do not overlap."""
    runs = list(runs)
    yield from without(runs, without(runs, known))
