"""The state machine of one stream shard: ``apply`` takes a command and returns its outcome.

Messages leave the machine as blocks. It asks ``FactsPort`` for facts about older messages.
"""

from collections.abc import Callable
from typing import Any, Final

from contrail_common import errors
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core.facts import FactsPort
from contrail_storage.core.producers import HELD_IDS_MAX
from contrail_storage.core.results import Refused, Result, Step, Writes
from contrail_storage.core.stream import (
    append,
    configuration,
    consumer_changes,
    data_loss,
    expiry,
    key_names,
    restore,
)
from contrail_storage.core.stream.removal import deletion, interest, limits, purge
from contrail_storage.core.stream.shard_state import Scan, ShardState

Handler = Callable[[ShardState, Step, Any], Result]
"""Applies a command of its kind to the state. It never raises, and reads nothing but both."""

HANDLERS: Final[dict[type, Handler]] = {
    cmd.ConfigureStream: configuration.configure,
    cmd.DropStream: configuration.drop,
    cmd.RestorePart: restore.restore_part,
    cmd.FinishRestore: restore.finish_restore,
    cmd.Append: append.append,
    cmd.NumberedAppend: append.append_numbered,
    cmd.DeleteMessage: deletion.delete,
    cmd.Trim: purge.trim,
    cmd.Remove: purge.remove,
    cmd.EnforceLimits: limits.enforce_limits,
    cmd.ExpireAge: limits.expire_age,
    cmd.Expire: expiry.expire,
    cmd.PutConsumer: consumer_changes.put,
    cmd.DropConsumer: consumer_changes.drop,
    cmd.Deliver: consumer_changes.change,
    cmd.Advance: consumer_changes.change,
    cmd.Acknowledge: consumer_changes.change,
    cmd.DeliverAcked: consumer_changes.change,
    cmd.Exhaust: consumer_changes.change,
    cmd.EnforceInterest: interest.enforce_interest,
    cmd.NameKeys: key_names.name,
    cmd.RetireKeys: key_names.retire,
    cmd.ShredKeys: key_names.shred,
    cmd.AcceptLoss: data_loss.accept_loss,
}
"""The handler of each kind of command."""

_WITHOUT_STREAM: Final = frozenset(
    {cmd.ConfigureStream, cmd.DropStream, cmd.RestorePart, cmd.FinishRestore, cmd.NameKeys}
)
"""Commands that may come before the stream exists: they see the time of their entry as it is."""


class StreamMachine(ShardState):
    """One stream shard: its state, changed by commands alone.

    It starts empty; a ``ConfigureStream`` or ``FinishRestore`` command creates the stream.
    """

    @classmethod
    def load(cls, shard_id: int, facts: FactsPort, scan: Scan) -> "StreamMachine":
        """Build the machine from its rows in the store."""
        machine = cls(shard_id, facts)
        machine.load_rows(scan)
        if machine.record is not None:
            limits.recheck_subjects(machine)
        return machine

    def apply(
        self,
        index: int,
        time_ns: int,
        command: cmd.Command,
        writes: Writes,
        skipped_ns: int = 0,
        term: int = 0,
    ) -> Result:
        """Apply one command at log ``index`` and ``time_ns``; all changes go into ``writes``.

        ``skipped_ns``: the sum of the jumps of log time until then. ``term``: that of the entry.
        """
        kind = type(command)
        handle = HANDLERS.get(kind, _refuse_unknown)
        if kind in _WITHOUT_STREAM:
            step = Step(index, time_ns, writes, skipped_ns, term)
            if kind is cmd.ConfigureStream and self.record is not None:
                expire_ids(self, step)  # in the window that was
            return handle(self, step, command)
        if self.record is None:
            return Refused(errors.STREAM_NOT_FOUND.code)
        if index != self.fresh_index:
            # The facts port answers for the blocks of earlier entries by now.
            self.fresh.clear()
            self.fresh_index = index
        # The time of a shard never goes backwards, whichever leader stamped the entry.
        now_ns = max(min(time_ns, INT64_MAX), self.counters.last_time_ns)
        step = Step(index, now_ns, writes, skipped_ns, term)
        # Before the command, so that an id is known for exactly the window, on every replica.
        if self.dedupe.marks or self.dedupe.held:
            expire_ids(self, step)
        result = handle(self, step, command)
        # Whichever command moved the head: a consumer must not wait for messages below it.
        if self.shard_id in writes.trimmed:
            consumer_changes.forget_trimmed(self, step)
        return result


def expire_ids(state: ShardState, step: Step) -> None:
    """Forget the ids that are older than the window and not held for a producer."""
    window_ns, dedupe, producers = state.config.duplicate_window_ns, state.dedupe, state.producers
    dedupe.expire(step.elapsed_ns, window_ns, step.writes, producers.held_from)
    if dedupe.held_ids > HELD_IDS_MAX:
        known_from = dedupe.forget_held(HELD_IDS_MAX, step.writes)
        producers.forget_below(known_from, step.writes)


def _refuse_unknown(state: ShardState, step: Step, command: cmd.Command) -> Result:
    del state, step, command
    return Refused(errors.INTERNAL.code, "the shard does not know this command")
