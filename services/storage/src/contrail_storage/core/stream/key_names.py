"""The subject keys of a replicated shard: their ids, never the keys, which are in files of members.

A key is named once most members have it, and before a message is sealed with it. Its row says that
it is in use, until it is shredded. So each member can tell which keys it lacks, and which ones it
must not have. The row has the mark of the subject, a keyed hash: a key that no member has any more
can be shredded with its subject. The ids ascend, and the last one that was named stays known.
"""

import numpy as np

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Done, Refused, Result, Step
from contrail_storage.core.stream.shard_state import ShardState


def name(state: ShardState, step: Step, command: cmd.NameKeys) -> Result:
    """Note keys that may seal messages from now on."""
    marks = [
        command.marks[at : at + keys.MARK_BYTES]
        for at in range(0, len(command.marks), keys.MARK_BYTES)
    ]
    if not command.is_sound() or len(command.marks) * 8 != len(command.ids) * keys.MARK_BYTES:
        return Refused(errors.INTERNAL.code, "the ids of subject keys are not in order")
    ids = np.frombuffer(command.ids, np.uint64).tolist()
    # Members destroy keys below the last named one that are not named: none may be named later.
    if ids[0] <= state.last_key:
        return Refused(errors.INTERNAL.code, "the id of a subject key is not new")
    for one, mark in zip(ids, marks, strict=True):
        step.writes.put(keys.large_key(keys.SUBJECT_KEY, state.shard_id, one), mark)
    state.last_key = ids[-1]
    last = state.last_key.to_bytes(8, "big")
    step.writes.put(keys.large_key(keys.SUBJECT_KEY, state.shard_id, 0), last)
    return Done()


def retire(state: ShardState, step: Step, command: cmd.RetireKeys) -> Result:
    """Let keys seal nothing more. The state stays the same: who leads keeps it in mind."""
    del state
    return _refused(step, command) or Done()


def shred(state: ShardState, step: Step, command: cmd.ShredKeys) -> Result:
    """Note that keys must not exist any more."""
    refused = _refused(step, command)
    if refused is not None:
        return refused
    for one in np.frombuffer(command.ids, np.uint64).tolist():
        step.writes.delete(keys.large_key(keys.SUBJECT_KEY, state.shard_id, one))
    return Done()


def _refused(step: Step, command: cmd.RetireKeys | cmd.ShredKeys) -> Refused | None:
    if not command.is_sound():
        return Refused(errors.INTERNAL.code, "the ids of subject keys are not in order")
    if command.term != step.term:
        # The leader of this term may have sealed a message with one of them.
        return Refused(errors.NOT_LEADER.code, "the keys were retired under another leader")
    return None
