"""Compares the copies of a range on several nodes, and names the sequences that differ.

Deleting a message reaches the copies one after another, so two of them may differ for a moment. A
change that one copy had applied in a first comparison is waited for at all others before a second
one. What differs in both is therefore no such change.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from contrail_pipeline.audit.digest import CHUNK, COLUMNS, ChunkDigest, digests, rows
from contrail_pipeline.audit.findings import Finding, Findings
from contrail_spark.client import JSON, REPLICA, ReplayClient
from contrail_spark.errors import ContrailSparkError, ProtocolError, UnavailableError
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import ReplayPlan, Split, plan_path
from contrail_spark.transport import opened

APPLIED: Final = "Contrail-Applied-Index"
SETTLE_S: Final = 60.0
_POLL_S: Final = 0.05

Parts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a shard: the names of the nodes, that of the leader first."""

    options: ReplayOptions
    plan: ReplayPlan
    shard: int
    nodes: tuple[str, ...]
    sleep: Callable[[float], None] = time.sleep

    def read(self, node: str, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
        """The messages that one node has."""
        client = ReplayClient(of_node(self.options, node), self.sleep)
        return client.read(self.plan, Split(self.shard, from_seq, to_seq, 0, 0), COLUMNS)

    def compare(self, from_seq: int, to_seq: int, led: Sequence[ChunkDigest]) -> list[Finding]:
        """Compare the copies of a range with what the leader has sent of it."""
        findings: list[Finding] = []
        readable: list[str] = []
        suspect: set[int] = set()
        own = {one.chunk: one for one in led}
        for node in self.nodes:
            try:
                found = {one.chunk: one for one in digests(self.read(node, from_seq, to_seq))}
            except ContrailSparkError as error:
                findings.append(unreadable(node, self.shard, error))
                continue
            readable.append(node)
            suspect |= {one for one in own.keys() | found if own.get(one) != found.get(one)}
        for low, high in self._extents(suspect, from_seq, to_seq):
            if len(readable) > 1:
                findings += replace(self, nodes=tuple(readable)).narrow(low, high)
        return findings

    def narrow(self, from_seq: int, to_seq: int) -> list[Finding]:
        """Name the sequences of a range that differ, and keep differing."""
        try:
            first = self._differing(from_seq, to_seq)
            if not first:
                return []
            self._settle()
            confirmed = {
                seq: found
                for seq, found in self._differing(from_seq, to_seq).items()
                if seq in first
            }
        except ContrailSparkError as error:
            return [unreadable(" or ".join(self.nodes), self.shard, error)]
        return self._named(confirmed)

    @staticmethod
    def _extents(chunks: set[int], from_seq: int, to_seq: int) -> Iterator[tuple[int, int]]:
        for chunk in sorted(chunks):
            yield max(from_seq, chunk * CHUNK), min(to_seq, (chunk + 1) * CHUNK - 1)

    def _differing(self, from_seq: int, to_seq: int) -> dict[int, dict[str, Parts | None]]:
        """For each sequence that is not the same everywhere, what each node has of it."""
        by_node: dict[str, dict[int, Parts]] = {}
        for node in self.nodes:
            batches = self.read(node, from_seq, to_seq)
            by_node[node] = {seq: parts for batch in batches for seq, parts in rows(batch)}
        every: set[int] = set().union(*by_node.values())
        found = {
            seq: {node: own.get(seq) for node, own in by_node.items()} for seq in sorted(every)
        }
        return {
            seq: parts
            for seq, parts in found.items()
            if any(one != parts[self.nodes[0]] for one in parts.values())
        }

    def _settle(self) -> None:
        """Wait until every copy has applied what any of them has applied now."""
        wanted = max(applied_index(self.options, self.shard, node) for node in self.nodes)
        deadline = time.monotonic() + SETTLE_S
        for node in self.nodes:
            while applied_index(self.options, self.shard, node) < wanted:
                if time.monotonic() > deadline:
                    raise UnavailableError(f"{node} has not caught up in {SETTLE_S:.0f} s")
                self.sleep(_POLL_S)

    def _named(self, differing: dict[int, dict[str, Parts | None]]) -> list[Finding]:
        by_node = {node: Findings(node, self.shard) for node in self.nodes}
        runs: dict[tuple[str, str, str], list[list[int]]] = {}
        for seq, found in differing.items():
            for node, kind, text in _verdicts(found):
                known = runs.setdefault((node, kind, text), [])
                if known and known[-1][1] == seq - 1:
                    known[-1][1] = seq
                else:
                    known.append([seq, seq])
        for (node, kind, text), found_runs in runs.items():
            for first, last in found_runs:
                by_node[node].add(kind, text, first, last)
        return [one for findings in by_node.values() for one in findings.all()]


def of_node(options: ReplayOptions, node: str) -> ReplayOptions:
    """The options that read the copy of one node."""
    return replace(options, consistency="any", replica=node)


def applied_index(options: ReplayOptions, shard: int, node: str) -> int:
    """The index up to which a node has applied the log of a shard.

    Raises UnavailableError if the node cannot be read.
    """
    asked = of_node(options, node)
    query = [("shard", str(shard)), ("consistency", "any"), ("replica", node)]
    what = f"ask {node} for its position"

    def attempt() -> int:
        with opened(asked, plan_path(asked), query, JSON, what) as answer:
            if answer.headers.get(REPLICA) != node:
                raise ProtocolError(f"{what}: the server does not say whose copy it has read")
            answer.read()
            return int(answer.headers.get(APPLIED, "0"))

    return ReplayClient(asked).repeat(attempt)


def unreadable(node: str, shard: int, error: Exception) -> Finding:
    """The finding that a copy could not be read."""
    return Finding("replica_unreadable", f"shard {shard} on {node}: {error}", node, shard)


def _verdicts(found: dict[str, Parts | None]) -> Iterator[tuple[str, str, str]]:
    """The nodes that differ from the majority, or else from the leader, and how."""
    votes = Counter(repr(parts) for parts in found.values())
    right = max(found.values(), key=lambda parts: votes[repr(parts)])
    others = " and ".join(node for node, parts in found.items() if parts == right)
    for node, parts in found.items():
        if parts == right:
            continue
        if parts is None:
            yield node, "replica_missing", f"is missing on {node}, but not on {others}"
        elif right is None:
            yield node, "replica_extra", f"is on {node}, but not on {others}"
        else:
            names = [name for name in parts if parts[name] != right[name]]
            text = f"has another {' and '.join(names)} on {node} than on {others}"
            yield node, "replica_changed", text
