"""Derives the promises of a history, and finds later records that break one.

The ledger takes records in order. An answered call took effect exactly once, and a refused call had
no effect. A call without an answer is in doubt until the next look shows whether it took effect;
from then on that is final. Every problem is a sentence.
"""

from collections import Counter, deque
from collections.abc import Iterable
from copy import deepcopy

from msgspec.structs import replace

from contrail_common import errors, model
from contrail_common.columns.blocks import message_size
from contrail_common.model import (
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
)
from contrail_link.contract.consume import Delivery
from tests.crash import history
from tests.crash.expected import AT_ANY_TIME, Consumer, Stream, put_consumer
from tests.crash.history import (
    Call,
    Delivered,
    Drained,
    Invoked,
    Looked,
    Opened,
    Outcome,
    Published,
    Record,
    Refused,
    Returned,
    Seen,
    Step,
    StreamView,
    Unknown,
)
from tests.crash.rules import (
    Between,
    as_marker,
    over_limits,
    purged,
)

_OF_NO_STREAM = (
    history.TakeCheckpoint
    | history.Reclaim
    | history.AskErasure
    | history.PassTime
    | history.WriteOut
)
_LONG_NS = 300_000_000_000
"""Longer than any time to live in a script."""
_READS = history.Pull | history.Look | history.Save | _OF_NO_STREAM


class Ledger:
    """Takes records in order and collects `problems`.

    With `trust_async`, an acknowledgement that nobody waited for counts as durable once a later
    call to the same log was answered. Leave it out if calls to the disk fail: then such an
    acknowledgement may be lost silently. With `accept_refusals`, a stream may report that its data
    is lost, as long as it keeps reporting that.
    """

    def __init__(self, *, trust_async: bool = True, accept_refusals: bool = False) -> None:
        self.problems: list[str] = []
        self.doubts: list[Call] = []
        self._streams: dict[str, Stream] = {}
        """The expected state of every stream, by name."""
        self._sent: dict[str, dict[str, PublishMessage]] = {}
        """Messages with an id that were ever published, by stream and id."""
        self._open: dict[int, Call] = {}
        """Calls of this life that have not returned, by number. A new life puts them in doubt."""
        self._trust_async = trust_async
        self._accept_refusals = accept_refusals
        self._receipts: list[str] = []
        """Ids of all receipts of erasures that were answered."""
        self._to_erase: set[tuple[str, int]] = set()
        """Stream and sequence of messages that an erasure named. They are not published again."""
        self._unsure: list[history.Ack] = []
        """Answered acknowledgements of this life that may not be durable yet."""
        self._unsure_before: dict[int, list[history.Ack]] = {}
        """The content of `_unsure` when a call began, by its number: they precede it in the log."""
        self._saved: dict[str, Stream] = {}
        """The expected state of streams when they were archived, by name."""
        self._begun_ns: dict[int, int] = {}
        """The log time when a call began, by its number."""
        self._during = AT_ANY_TIME
        """The log times between which the current call ran: when its messages were stored."""
        self._latest_ns = 0
        """The latest log time in any record, with the jumps of `PassTime`."""

    def take(self, records: Iterable[Record]) -> list[str]:
        """Take records; returns all problems so far."""
        for record in records:
            match record:
                case Opened():
                    self.doubts += self._open.values()
                    self._open.clear()
                    self._unsure.clear()
                case Invoked():
                    self._invoked(record)
                case Returned():
                    self._returned(record)
                case Seen():
                    self._seen(record)
                case Drained():
                    self._drained(record)
        return self.problems

    def follow_up(self) -> list[Step]:
        """The calls for the node that opens the data next.

        These are all calls in doubt, except messages without an id; all message ids and receipts
        that were ever answered; and a new message for every stream.
        """
        doubts = self.doubts + list(self._open.values())
        steps: list[Step] = [[call] for call in doubts if _may_repeat(call)]
        steps += [[history.AskErasure(known)] for known in self._receipts]
        for name, stream in self._streams.items():
            if stream.config.sealed:
                continue
            # Publishing a message that is to be erased again would bring its bytes back.
            ids = [one for one, seq in stream.ids.items() if (name, seq) not in self._to_erase]
            known = [self._sent[name][msg_id] for msg_id in ids]
            subject = stream.config.subjects[0].replace(">", "probe").replace("*", "probe")
            probe = PublishMessage(subject, None, f"probe {name} {stream.last_seq}".encode())
            steps += [[history.Publish(name, known)]] if known else []
            steps += [[history.Publish(name, [probe])]]
        if any(_ends_by_time(stream.config) for stream in self._streams.values()):
            steps.append([history.PassTime(_LONG_NS)])
        return steps

    def _fault(self, problem: str) -> None:
        self.problems.append(problem)

    # Calls ---------------------------------------------------------------------------------------

    def _invoked(self, record: Invoked) -> None:
        self._open[record.number] = record.call
        self._begun_ns[record.number] = record.time_ns
        ahead_ns = record.call.time_ns if isinstance(record.call, history.PassTime) else 0
        self._latest_ns = max(self._latest_ns, record.time_ns + ahead_ns)
        self._unsure_before[record.number] = list(self._unsure)
        if isinstance(record.call, history.Erase):
            self._to_erase |= {(record.call.stream, seq) for seq in record.call.seqs}
        if isinstance(record.call, history.Publish):
            sent = self._sent.setdefault(record.call.stream, {})
            sent.update({one.msg_id: one for one in record.call.messages if one.msg_id})

    def _returned(self, record: Returned) -> None:
        call = self._open.pop(record.number)
        self._during = Between(self._begun_ns[record.number], record.time_ns)
        match record.outcome:
            case Unknown():
                self.doubts.append(call)
            case Refused(name=errors.STREAM_NOT_FOUND.name) if call in self.doubts:
                # An earlier attempt, whose outcome is unknown, removed the stream.
                self._streams.pop(_stream_of(call), None)
            case Refused() if isinstance(call, history.AskErasure):
                self._fault(f"the receipt {call.erasure_id} is not known")
            case Refused():
                return
            case outcome:
                self._answered(call, outcome)
                self._promote(call, self._unsure_before[record.number])

    def _promote(self, call: Call, unsure: list[history.Ack]) -> None:
        """Settle acknowledgements before this call: they precede it in the log, so are durable."""
        if not self._trust_async or isinstance(call, _READS):
            return
        if isinstance(call, history.Ack) and not call.sync:
            return
        for ack in unsure:
            if ack in self._unsure and ack.stream == _stream_of(call):
                self._unsure.remove(ack)
                self._settle(ack)

    def _answered(self, call: Call, outcome: Outcome) -> None:
        match call:
            case history.PutStream():
                self._put_stream(call.config)
            case history.DeleteStream():
                self._streams.pop(call.stream, None)
            case history.Restore():
                self._restore(call)
            case _ if isinstance(call, _OF_NO_STREAM):
                return
            case _ if (stream := self._streams.get(_stream_of(call))) is not None:
                self._change(stream, call, outcome)
            case _:
                self._fault(f"stream {_stream_of(call)} answers, and is not there")

    def _change(self, stream: Stream, call: Call, outcome: Outcome) -> None:
        if isinstance(outcome, history.Erased):
            self._receipts.append(outcome.erasure_id)
        match call:
            case history.Remove() | history.Erase() | history.Purge():
                for seq in _removed_by(stream, call):
                    del stream.live[seq]
            case history.Save():
                self._saved[call.stream] = deepcopy(stream)
            case history.PutConsumer():
                put_consumer(stream, call.config)
            case history.DropConsumer():
                stream.consumers.pop(call.consumer, None)
            case history.Publish():
                assert isinstance(outcome, Published)
                self._published(stream, call, outcome)
            case history.Pull():
                assert isinstance(outcome, Delivered)
                self._delivered(stream, call.consumer, outcome.deliveries)
            case history.Look():
                assert isinstance(outcome, Looked)
                self._progress(stream.consumers[call.consumer], outcome.info)
            case history.Ack() if call.kind in ("ack", "term"):
                if call.sync:
                    self._settle(call)
                else:
                    self._unsure.append(call)
                    stream.consumers[call.consumer].maybe_settled |= set(call.seqs)

    def _settle(self, ack: history.Ack) -> None:
        stream = self._streams.get(ack.stream)
        consumer = stream.consumers.get(ack.consumer) if stream else None
        if consumer is not None:
            consumer.settled |= set(ack.seqs)
            consumer.maybe_settled -= set(ack.seqs)
        if stream is not None and stream.config.retention == "workqueue":
            for seq in ack.seqs:
                stream.live.pop(seq, None)
        if stream is not None:
            for seq in stream.unneeded(surely=True) & set(ack.seqs):
                del stream.live[seq]

    def _restore(self, call: history.Restore) -> None:
        stream = deepcopy(self._saved[call.saved])
        stream.config = replace(stream.config, name=call.stream)
        self._streams[call.stream] = stream
        self._sent[call.stream] = {**self._sent.get(call.saved, {})}

    def _put_stream(self, config: StreamConfig) -> None:
        stream = self._streams.get(config.name)
        if stream is None:
            self._streams[config.name] = Stream(config, config.first_seq - 1)
        else:
            stream.config = config
            stream.keep_limits(lowered=True)

    def _published(self, stream: Stream, call: history.Publish, outcome: Published) -> None:
        for message, result in zip(call.messages, outcome.results, strict=True):
            if result.code == errors.OUTCOME_UNKNOWN.code:
                self.doubts.append(history.Publish(call.stream, [message]))
            elif result.code == 0:
                self._stored(stream, message, result.seq, duplicate=result.duplicate)

    def _stored(
        self, stream: Stream, message: PublishMessage, seq: int, *, duplicate: bool
    ) -> None:
        known = stream.ids.get(message.msg_id or "")
        doubtful = any(message in call.messages for call in self._publishes(stream.config.name))
        if known is not None:
            if not duplicate or seq != known:
                self._fault(f"id {message.msg_id} has sequence {known}, a repeat got {seq}")
        elif duplicate and not doubtful:
            self._fault(f"id {message.msg_id} is called a duplicate of {seq}, it was never stored")
        elif seq <= stream.last_seq:
            self._fault(f"sequence {seq} was given a second time, after {stream.last_seq}")
        else:
            stream.add(seq, message, self._during)

    def _publishes(self, stream: str) -> list[history.Publish]:
        return [
            call
            for call in self.doubts
            if isinstance(call, history.Publish) and call.stream == stream
        ]

    def _delivered(self, stream: Stream, name: str, deliveries: list[Delivery]) -> None:
        consumer = stream.consumers[name]
        for delivery in deliveries:
            message = delivery.message
            if message.seq in consumer.settled:
                self._fault(f"{name} got {message.seq} again after its confirmed acknowledgement")
            expected = stream.live.get(message.seq)
            if expected is None:
                self._fault(f"{name} got {message.seq}, which is not there")
            elif not _same(expected, message):
                self._fault(f"{name} got another content for {message.seq}")

    def _progress(self, consumer: Consumer, info: ConsumerInfo) -> None:
        floor, delivered = info.ack_floor.stream_seq, info.delivered.stream_seq
        for what, before, now in (
            ("floor", consumer.floor, floor),
            ("last delivery", consumer.delivered_seq, delivered),
        ):
            if now < before:
                self._fault(f"the {what} of {consumer.config.name} fell from {before} to {now}")
        consumer.floor, consumer.delivered_seq = floor, delivered

    # Looks ---------------------------------------------------------------------------------------

    def _seen(self, seen: Seen) -> None:
        self._latest_ns = max(self._latest_ns, seen.time_ns)
        for trouble in seen.half_made:
            self._fault(trouble)
        for name, reason in seen.unreadable.items():
            if not self._accept_refusals or not reason.startswith(errors.DATA_LOST.name):
                self._fault(f"{name} cannot be read: {reason}")
        if not seen.unreadable and seen.listed != sorted(seen.streams):
            self._fault(f"listed are {seen.listed}, there are {sorted(seen.streams)}")
        for name in set(self._streams) - set(seen.streams) - set(seen.unreadable):
            if not any(isinstance(call, history.DeleteStream) for call in self._doubts_of(name)):
                self._fault(f"stream {name} is gone")
            del self._streams[name]
        for name, view in seen.streams.items():
            doubts = self._doubts_of(name)
            copies = [call for call in doubts if isinstance(call, history.Restore)]
            if name not in self._streams and copies:
                self._restore(copies[0])
            if name not in self._streams:
                if not any(isinstance(call, history.PutStream) for call in doubts):
                    self._fault(f"stream {name} was never made, or was deleted")
                self._put_stream(view.config)
            if seen.kept:
                self._see_kept(self._streams[name], view, seen.time_ns)
            self._see_stream(self._streams[name], view, doubts)
        self.doubts.clear()

    def _see_kept(self, stream: Stream, view: StreamView, now_ns: int) -> None:
        """Report messages that should be removed by now and still exist."""
        name = stream.config.name
        there = {message.seq for message in view.messages}
        if late := stream.due(now_ns) & there:
            self._fault(f"{name} still shows {sorted(late)}, which were due")
        if spare := stream.unneeded(surely=True) & there:
            self._fault(f"{name} keeps {sorted(spare)}, which nobody needs")
        per_subject = Counter(message.subject for message in view.messages)
        if 0 < view.config.max_msgs_per_subject < max(per_subject.values(), default=0):
            self._fault(f"{name} has more of a subject than it may: {per_subject}")

    def _doubts_of(self, name: str) -> list[Call]:
        return [call for call in self.doubts if _stream_of(call) == name]

    def _see_stream(self, stream: Stream, view: StreamView, doubts: list[Call]) -> None:
        name = stream.config.name
        configs = [call.config for call in doubts if isinstance(call, history.PutStream)]
        if view.config not in (stream.config, *configs):
            self._fault(f"{name} has the configuration {view.config}")
        if set(view.claimed_subjects) != set(view.config.subjects):
            self._fault(f"{name} claims {view.claimed_subjects}, not {view.config.subjects}")
        stream.config = view.config
        for call in doubts:
            if isinstance(call, history.Ack) and call.consumer in stream.consumers:
                stream.consumers[call.consumer].maybe_settled |= set(call.seqs)
        self._see_messages(stream, view, doubts, shrinking=bool(configs))
        self._see_counts(view)
        self._see_consumers(stream, view, doubts)

    def _see_messages(
        self, stream: Stream, view: StreamView, doubts: list[Call], *, shrinking: bool
    ) -> None:
        name = stream.config.name
        seen = {message.seq: message for message in view.messages}
        self._adopt_markers(stream, view)
        self._adopt_new(stream, seen, doubts)
        self._pass_over_unwanted(stream, view, doubts)
        if view.state.last_seq != stream.last_seq:
            self._fault(f"{name} ends at {view.state.last_seq}, not at {stream.last_seq}")
        groups = _removals_in_doubt(stream, doubts)
        self._see_markers(stream, seen, set().union(*groups))
        groups += [{seq} for seq in stream.maybe_due(self._latest_ns)]
        if shrinking:
            gone = over_limits(stream.config, stream.live)
            gone |= over_limits(stream.config, stream.live, lowered=True)
            groups += [{seq} for seq in gone]
        required = set(stream.live).difference(*groups)
        if lost := sorted(required - set(seen)):
            self._fault(f"{name} has lost {lost}")
        if ghosts := sorted(set(seen) - set(stream.live)):
            self._fault(f"{name} shows {ghosts}, which were removed or never stored")
        for group in groups:
            if group & set(seen) and group - set(seen):
                self._fault(f"{name} did a removal by half: {sorted(group)}")
        stream.live = {seq: stream.live[seq] for seq in seen if seq in stream.live}
        stream.times = {seq: Between(seen[seq].time_ns, seen[seq].time_ns) for seq in stream.live}
        for seq, message in stream.live.items():
            if not _same(message, seen[seq]):
                self._fault(f"{name} shows another content at {seq}")

    def _adopt_markers(self, stream: Stream, view: StreamView) -> None:
        """Accept markers: each follows all messages and replaces due messages of its subject."""
        config = stream.config
        for stored in view.messages:
            marker = as_marker(config, stored)
            if marker is None or stored.seq in stream.live:
                continue
            own = {seq for seq, one in stream.live.items() if one.subject == stored.subject}
            if stored.seq != stream.last_seq + 1 or not own:
                self._fault(f"{config.name} has a marker of nothing at {stored.seq}")
            if own - stream.maybe_due(self._latest_ns):
                self._fault(f"{config.name} has a marker at {stored.seq} beside messages")
            for seq in own:
                del stream.live[seq]
            stream.add(stored.seq, marker, Between(stored.time_ns, stored.time_ns))

    def _see_markers(
        self, stream: Stream, seen: dict[int, StoredMessage], removed: set[int]
    ) -> None:
        """Report missing markers: a subject whose last message expired must have left one.

        A marker that expires leaves no further one.
        """
        if not stream.config.subject_delete_marker_ttl_ns:
            return
        left = {message.subject for message in seen.values()}
        for seq in set(stream.live) - set(seen) - removed:
            message = stream.live[seq]
            is_marker = model.MARKER_REASON in (message.headers or {})
            if not is_marker and message.subject not in left:
                self._fault(f"{stream.config.name} has no marker of {message.subject}")

    def _pass_over_unwanted(self, stream: Stream, view: StreamView, doubts: list[Call]) -> None:
        """Skip messages in doubt that no consumer wants: they only use up sequences."""
        doubtful = [call for call in doubts if isinstance(call, history.Publish)]
        unwanted = [one for call in doubtful for one in call.messages if not stream.is_stored(one)]
        missing = view.state.last_seq - stream.last_seq
        if 0 < missing <= len(unwanted):
            for message in unwanted[:missing]:
                stream.add(stream.last_seq + 1, message)

    def _adopt_new(
        self, stream: Stream, seen: dict[int, StoredMessage], doubts: list[Call]
    ) -> None:
        """Messages after the last answered sequence must come from calls in doubt, in order."""
        publishes = [call for call in doubts if isinstance(call, history.Publish)]
        candidates = deque(message for call in publishes for message in call.messages)
        passed_over: list[PublishMessage] = []
        for seq in sorted(seq for seq in seen if seq > stream.last_seq):
            while candidates and not _same(candidates[0], seen[seq]):
                passed_over.append(candidates.popleft())
            if not candidates:
                self._fault(f"{stream.config.name} holds at {seq} what nobody sent")
                return
            stream.add_evicted(seq - stream.last_seq - 1, passed_over)
            if seq != stream.last_seq + 1:
                self._fault(f"{stream.config.name} skips from {stream.last_seq} to {seq}")
            message = candidates.popleft()
            if message.msg_id in stream.ids:
                self._fault(f"id {message.msg_id} is stored a second time, at {seq}")
            at = seen[seq].time_ns
            stream.add(seq, message, Between(at, at))
        for call in publishes:
            there = [any(_same(one, each) for each in seen.values()) for one in call.messages]
            if call.atomic and any(there) and not all(there):
                self._fault(f"{stream.config.name} has a part of an atomic batch: {there}")

    def _see_counts(self, view: StreamView) -> None:
        name, state = view.config.name, view.state
        seqs = [message.seq for message in view.messages]
        if view.fetched != view.messages:
            self._fault(f"{name}: single reads and a range read differ")
        if view.replayed != seqs:
            self._fault(f"{name}: a replay has {view.replayed}, a range read {seqs}")
        first_seq = min(seqs, default=state.last_seq + 1)
        counted = (
            len(seqs),
            sum(message_size(message.headers, len(message.payload)) for message in view.messages),
            first_seq,
            len({message.subject for message in view.messages}),
            state.last_seq - first_seq + 1 - len(seqs),
            len(view.consumers),
        )
        claimed = (
            state.messages,
            state.bytes,
            state.first_seq,
            state.num_subjects,
            state.num_deleted,
            state.consumer_count,
        )
        if claimed != counted:
            self._fault(f"{name} says {claimed}, counted are {counted}")

    def _see_consumers(self, stream: Stream, view: StreamView, doubts: list[Call]) -> None:
        name = stream.config.name
        dropped = {call.consumer for call in doubts if isinstance(call, history.DropConsumer)}
        configs = [call.config for call in doubts if isinstance(call, history.PutConsumer)]
        if gone := set(stream.consumers) - set(view.consumers) - dropped:
            self._fault(f"{name} has lost the consumers {sorted(gone)}")
        stream.consumers = {
            key: consumer for key, consumer in stream.consumers.items() if key in view.consumers
        }
        for key, info in view.consumers.items():
            known = stream.consumers.get(key)
            if info.config not in ([known.config] if known else []) + configs:
                self._fault(f"consumer {key} of {name} has the configuration {info.config}")
            put_consumer(stream, info.config)
            self._progress(stream.consumers[key], info)

    def _drained(self, drained: Drained) -> None:
        stream = self._streams.get(drained.stream)
        consumer = stream.consumers.get(drained.consumer) if stream else None
        if stream is None or consumer is None:
            self._fault(f"{drained.consumer} of {drained.stream} delivers, and is not there")
            return
        self._delivered(stream, drained.consumer, drained.deliveries)
        seqs = [delivery.message.seq for delivery in drained.deliveries]
        if len(set(seqs)) != len(seqs):
            self._fault(f"{drained.consumer} got messages twice at once: {seqs}")
        wanted = {
            seq for seq, message in stream.live.items() if consumer.wants(seq, message.subject)
        }
        if unasked := set(seqs) - wanted:
            self._fault(f"{drained.consumer} got {sorted(unasked)}, which it does not want")
        if skipped := wanted - set(seqs) - consumer.settled - consumer.maybe_settled:
            self._fault(f"{drained.consumer} never gets {sorted(skipped)}")
        consumer.settled |= wanted - set(seqs)
        consumer.maybe_settled.clear()


def _removed_by(stream: Stream, call: history.Remove | history.Erase | history.Purge) -> set[int]:
    if isinstance(call, history.Purge):
        return purged(stream.live, call.subject, call.up_to_seq, call.keep)
    if isinstance(call, history.Erase) and call.subject:
        return purged(stream.live, call.subject, 0, 0)
    seqs = {call.seq} if isinstance(call, history.Remove) else set(call.seqs)
    return seqs & set(stream.live)


def _removals_in_doubt(stream: Stream, doubts: list[Call]) -> list[set[int]]:
    groups: list[set[int]] = []
    for call in doubts:
        if isinstance(call, history.Remove | history.Erase | history.Purge):
            groups.append(_removed_by(stream, call))
        elif isinstance(call, history.Ack) and stream.config.retention == "workqueue":
            groups.append(set(call.seqs) & set(stream.live))
    dropped = frozenset(one.consumer for one in doubts if isinstance(one, history.DropConsumer))
    return groups + [{seq} for seq in stream.unneeded(surely=False, without=dropped)]


def _may_repeat(call: Call) -> bool:
    if isinstance(call, history.Publish):
        return all(message.msg_id for message in call.messages)
    return not isinstance(call, history.Restore | _READS)


def _ends_by_time(config: StreamConfig) -> bool:
    return config.allow_msg_ttl or config.max_age_ns > 0


def _stream_of(call: Call) -> str:
    if isinstance(call, history.PutStream):
        return call.config.name
    return "" if isinstance(call, _OF_NO_STREAM) else call.stream


def _same(sent: PublishMessage, stored: StoredMessage) -> bool:
    return (sent.subject, sent.headers or None, sent.payload) == (
        stored.subject,
        stored.headers or None,
        stored.payload,
    )
