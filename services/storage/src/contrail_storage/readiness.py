"""The parts of a node that are not ready, by name."""

from collections.abc import Collection, Mapping
from typing import Final

from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.raft_port import Group
from contrail_storage.replica.shard import Shard

BEHIND_S: Final = 1.0
"""A member that has not applied what was committed this long ago is behind."""


def unfit_members(groups: Mapping[int, Group]) -> dict[str, str]:
    """Return in which groups this node could not replace another member now, and why."""
    unfit: dict[str, str] = {}
    for number, group in groups.items():
        if group.flags:
            unfit[f"group {number}"] = "what this node has of it is incomplete"
        elif group.staleness_s() >= BEHIND_S:
            unfit[f"group {number}"] = "this node is behind, or hears no leader"
    return unfit


def problems_of(
    failure: str,
    groups: Collection[Group],
    shards: Collection[Shard],
    logs: Collection[Proposer],
    *,
    serves: bool,
) -> dict[str, str]:
    """Return what is not ready, and why.

    ``failure`` is the problem of the log or the store; ``logs`` are the proposers.
    """
    stuck = [log.problem for log in logs if log.problem]
    problems: dict[str, str] = {}
    if failure:
        problems["storage"] = failure
        if serves and any(shard.in_memory for shard in shards):
            problems["storage"] += "; streams in memory are served"
    elif not serves:
        problems["storage"] = "recovering"
    # Serving and without a leader: only for a moment, after a failure of the log.
    elif not all(group.is_leader for group in groups if group.is_alone):
        problems["storage"] = "no leader"
    elif stuck:
        problems["storage"] = "; ".join(stuck)
    for shard in shards:
        if shard.damaged:
            record = shard.machine.record  # none where a restore was interrupted
            what = f"stream {record.config.name}" if record else f"shard {shard.machine.shard_id}"
            problems[what] = shard.damaged
    return problems
