"""The library's own methods in place of ours, to see that simulations notice their faults."""

import pytest

from contrail_replicator.messages import Append, Heartbeat, HeartbeatReply, Reply
from contrail_replicator.raft_core import RaftCore


def pass_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core have messages of a leader as they come, and cut as it likes."""

    def append(core: RaftCore, peer: str, message: Append) -> None:
        before = message.previous_index + 1
        entries = [(data, before + at, term) for at, (term, data) in enumerate(message.entries)]
        message_ = {"prevLogIdx": before - 1, "prevLogTerm": message.previous_term}
        rest = {"commit_index": message.commit, "entries": entries}
        core._give(peer, {"type": "append_entries", "term": message.term, **message_, **rest})
        if core._journal.term_at(before - 1) != message.previous_term:
            core._send_to_peer(peer, Reply(core.term(), message.round, False, 1))

    def heartbeat(core: RaftCore, peer: str, message: Heartbeat) -> None:
        message_ = {"commit_index": message.commit, "serialized": None}
        core._give(peer, {"type": "append_entries", "term": message.term, **message_})
        core._send_to_peer(peer, HeartbeatReply(core.term(), message.round, 0, 0, 0))

    monkeypatch.setattr(RaftCore, "_handle_append", append)
    monkeypatch.setattr(RaftCore, "_handle_heartbeat", heartbeat)
    monkeypatch.setattr(
        RaftCore,
        "_SyncObj__getEntries",
        lambda core, index, count=None, size=None: (
            [] if index is None else core._journal.slice(index, count, size)
        ),
    )
