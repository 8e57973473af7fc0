"""What a history promises, and where a later record breaks a promise.

The ledger takes records in order. A call that was answered has had its effect, once; a refused one
has had none; one without an answer is in doubt until the next look shows which of the two holds,
and from then on that is the truth. Every problem is a sentence.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from contrail_common import errors
from contrail_common.link import Delivery
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    StoredMessage,
    StreamConfig,
    message_size,
)
from contrail_common.subjects import matches_any
from tests.crash import history
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

_OF_NO_STREAM = history.TakeCheckpoint | history.MakeRoom | history.AskErasure


@dataclass(eq=False)
class _Consumer:
    config: ConsumerConfig
    start_seq: int
    settled: set[int] = field(default_factory=set)
    maybe_settled: set[int] = field(default_factory=set)
    floor: int = 0
    delivered_seq: int = 0

    def wants(self, seq: int, subject: str) -> bool:
        filters = self.config.filter_subjects
        return seq >= self.start_seq and (not filters or matches_any(filters, subject))


@dataclass(eq=False)
class _Stream:
    config: StreamConfig
    last_seq: int
    live: dict[int, PublishMessage] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    consumers: dict[str, _Consumer] = field(default_factory=dict)

    def add(self, seq: int, message: PublishMessage) -> None:
        self.live[seq] = message
        self.last_seq = max(self.last_seq, seq)
        if message.msg_id:
            self.ids[message.msg_id] = seq
        self.keep_limits()

    def add_evicted(self, count: int, candidates: list[PublishMessage]) -> None:
        """Add messages of a request that its own later messages have taken away again."""
        if count and max(self.config.max_msgs, self.config.max_bytes) >= 0:
            fresh = [one for one in candidates if one.msg_id not in self.ids and not one.expected]
            for message in fresh[-count:]:
                self.add(self.last_seq + 1, message)

    def keep_limits(self) -> None:
        config = self.config
        if config.discard == "new":
            return
        size = sum(message_size(one.headers, len(one.payload)) for one in self.live.values())
        for seq in sorted(self.live):
            over_count = 0 <= config.max_msgs < len(self.live)
            if not over_count and not 0 <= config.max_bytes < size:
                return
            oldest = self.live.pop(seq)
            size -= message_size(oldest.headers, len(oldest.payload))

    def purged(self, purge: history.Purge) -> set[int]:
        if purge.keep:
            return set(sorted(self.live)[: -purge.keep])
        return {seq for seq in self.live if not purge.up_to_seq or seq < purge.up_to_seq}


class Ledger:
    """Takes records, in order, and collects `problems`.

    With `trust_async` an acknowledgement that was not waited for counts as durable once a later
    call to the same log was answered; where calls to the disk fail it may be lost quietly. With
    `accept_refusals` a stream may say that its data is lost, as long as it says so.
    """

    def __init__(self, *, trust_async: bool = True, accept_refusals: bool = False) -> None:
        self.problems: list[str] = []
        self.doubts: list[Call] = []
        self._streams: dict[str, _Stream] = {}
        self._sent: dict[str, dict[str, PublishMessage]] = {}
        self._open: dict[int, Call] = {}
        self._trust_async = trust_async
        self._accept_refusals = accept_refusals
        self._receipts: list[str] = []
        self._to_erase: set[tuple[str, int]] = set()
        self._unsure: list[history.Ack] = []
        self._unsure_before: dict[int, list[history.Ack]] = {}

    def take(self, records: Iterable[Record]) -> list[str]:
        """Take records; answer all problems so far."""
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
        """What to ask of the node that opens the data next.

        Whatever is in doubt once more (messages without an id excepted), every id that was ever
        answered, and a new message for every stream.
        """
        doubts = self.doubts + list(self._open.values())
        steps: list[Step] = [[call] for call in doubts if _may_repeat(call)]
        steps += [[history.AskErasure(known)] for known in self._receipts]
        for name, stream in self._streams.items():
            # Sending again what is to be erased would bring its bytes back.
            ids = [one for one, seq in stream.ids.items() if (name, seq) not in self._to_erase]
            known = [self._sent[name][msg_id] for msg_id in ids]
            subject = stream.config.subjects[0].replace(">", "probe").replace("*", "probe")
            probe = PublishMessage(subject, None, f"probe {name} {stream.last_seq}".encode())
            steps += [[history.Publish(name, known)]] if known else []
            steps += [[history.Publish(name, [probe])]]
        return steps

    def _fault(self, problem: str) -> None:
        self.problems.append(problem)

    # Calls ---------------------------------------------------------------------------------------

    def _invoked(self, record: Invoked) -> None:
        self._open[record.number] = record.call
        self._unsure_before[record.number] = list(self._unsure)
        if isinstance(record.call, history.Erase):
            self._to_erase |= {(record.call.stream, seq) for seq in record.call.seqs}
        if isinstance(record.call, history.Publish):
            sent = self._sent.setdefault(record.call.stream, {})
            sent.update({one.msg_id: one for one in record.call.messages if one.msg_id})

    def _returned(self, record: Returned) -> None:
        call = self._open.pop(record.number)
        match record.outcome:
            case Unknown():
                self.doubts.append(call)
            case Refused(name=errors.STREAM_NOT_FOUND.name) if call in self.doubts:
                # The first attempt, of unknown outcome, has removed it.
                self._streams.pop(_stream_of(call), None)
            case Refused() if isinstance(call, history.AskErasure):
                self._fault(f"the receipt {call.erasure_id} is not known")
            case Refused():
                return
            case outcome:
                self._answered(call, outcome)
                self._promote(call, self._unsure_before[record.number])

    def _promote(self, call: Call, unsure: list[history.Ack]) -> None:
        """Earlier acknowledgements stand before this call in the log: they are durable, too."""
        reads = history.Pull | history.Look | _OF_NO_STREAM
        if not self._trust_async or isinstance(call, reads):
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
            case history.TakeCheckpoint() | history.MakeRoom() | history.AskErasure():
                return
            case _ if call.stream in self._streams:
                self._change(self._streams[call.stream], call, outcome)
            case _:
                self._fault(f"stream {call.stream} answers, and is not there")

    def _change(self, stream: _Stream, call: Call, outcome: Outcome) -> None:
        if isinstance(outcome, history.Erased):
            self._receipts.append(outcome.erasure_id)
        match call:
            case history.Remove() | history.Erase() | history.Purge():
                for seq in _removed_by(stream, call):
                    del stream.live[seq]
            case history.PutConsumer():
                _put_consumer(stream, call.config)
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

    def _put_stream(self, config: StreamConfig) -> None:
        stream = self._streams.get(config.name)
        if stream is None:
            self._streams[config.name] = _Stream(config, config.first_seq - 1)
        else:
            stream.config = config
            stream.keep_limits()

    def _published(self, stream: _Stream, call: history.Publish, outcome: Published) -> None:
        for message, result in zip(call.messages, outcome.results, strict=True):
            if result.code == errors.OUTCOME_UNKNOWN.code:
                self.doubts.append(history.Publish(call.stream, [message]))
            elif result.code == 0:
                self._stored(stream, message, result.seq, duplicate=result.duplicate)

    def _stored(
        self, stream: _Stream, message: PublishMessage, seq: int, *, duplicate: bool
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
            stream.add(seq, message)

    def _publishes(self, stream: str) -> list[history.Publish]:
        return [
            call
            for call in self.doubts
            if isinstance(call, history.Publish) and call.stream == stream
        ]

    def _delivered(self, stream: _Stream, name: str, deliveries: list[Delivery]) -> None:
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

    def _progress(self, consumer: _Consumer, info: ConsumerInfo) -> None:
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
            if name not in self._streams:
                if not any(isinstance(call, history.PutStream) for call in doubts):
                    self._fault(f"stream {name} was never made, or was deleted")
                self._put_stream(view.config)
            self._see_stream(self._streams[name], view, doubts)
        self.doubts.clear()

    def _doubts_of(self, name: str) -> list[Call]:
        return [call for call in self.doubts if _stream_of(call) == name]

    def _see_stream(self, stream: _Stream, view: StreamView, doubts: list[Call]) -> None:
        name = stream.config.name
        configs = [call.config for call in doubts if isinstance(call, history.PutStream)]
        if view.config not in (stream.config, *configs):
            self._fault(f"{name} has the configuration {view.config}")
        if set(view.claimed_subjects) != set(view.config.subjects):
            self._fault(f"{name} claims {view.claimed_subjects}, not {view.config.subjects}")
        stream.config = view.config
        self._see_messages(stream, view, doubts, shrinking=bool(configs))
        self._see_counts(view)
        self._see_consumers(stream, view, doubts)

    def _see_messages(
        self, stream: _Stream, view: StreamView, doubts: list[Call], *, shrinking: bool
    ) -> None:
        name = stream.config.name
        seen = {message.seq: message for message in view.messages}
        self._adopt_new(stream, seen, doubts)
        if view.state.last_seq != stream.last_seq:
            self._fault(f"{name} ends at {view.state.last_seq}, not at {stream.last_seq}")
        groups = _removals_in_doubt(stream, doubts)
        if shrinking:
            groups += [{seq} for seq in stream.live if seq < min(seen, default=stream.last_seq + 1)]
        required = set(stream.live).difference(*groups)
        if lost := sorted(required - set(seen)):
            self._fault(f"{name} has lost {lost}")
        if ghosts := sorted(set(seen) - set(stream.live)):
            self._fault(f"{name} shows {ghosts}, which were removed or never stored")
        for group in groups:
            if group & set(seen) and group - set(seen):
                self._fault(f"{name} did a removal by half: {sorted(group)}")
        stream.live = {seq: stream.live[seq] for seq in seen if seq in stream.live}
        for seq, message in stream.live.items():
            if not _same(message, seen[seq]):
                self._fault(f"{name} shows another content at {seq}")

    def _adopt_new(
        self, stream: _Stream, seen: dict[int, StoredMessage], doubts: list[Call]
    ) -> None:
        """What stands behind the last answered sequence must come from calls in doubt, in order."""
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
            stream.add(seq, message)

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

    def _see_consumers(self, stream: _Stream, view: StreamView, doubts: list[Call]) -> None:
        name = stream.config.name
        dropped = {call.consumer for call in doubts if isinstance(call, history.DropConsumer)}
        configs = [call.config for call in doubts if isinstance(call, history.PutConsumer)]
        if gone := set(stream.consumers) - set(view.consumers) - dropped:
            self._fault(f"{name} has lost the consumers {sorted(gone)}")
        for call in doubts:
            if isinstance(call, history.Ack) and call.consumer in stream.consumers:
                stream.consumers[call.consumer].maybe_settled |= set(call.seqs)
        stream.consumers = {
            key: consumer for key, consumer in stream.consumers.items() if key in view.consumers
        }
        for key, info in view.consumers.items():
            known = stream.consumers.get(key)
            if info.config not in ([known.config] if known else []) + configs:
                self._fault(f"consumer {key} of {name} has the configuration {info.config}")
            _put_consumer(stream, info.config)
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


def _put_consumer(stream: _Stream, config: ConsumerConfig) -> None:
    known = stream.consumers.get(config.name)
    if known is not None:
        known.config = config
        return
    start_seq = stream.last_seq + 1 if config.deliver_policy == "new" else 1
    stream.consumers[config.name] = _Consumer(config, start_seq)


def _removed_by(stream: _Stream, call: history.Remove | history.Erase | history.Purge) -> set[int]:
    if isinstance(call, history.Purge):
        return stream.purged(call)
    seqs = {call.seq} if isinstance(call, history.Remove) else set(call.seqs)
    return seqs & set(stream.live)


def _removals_in_doubt(stream: _Stream, doubts: list[Call]) -> list[set[int]]:
    groups: list[set[int]] = []
    for call in doubts:
        if isinstance(call, history.Remove | history.Erase | history.Purge):
            groups.append(_removed_by(stream, call))
        elif isinstance(call, history.Ack) and stream.config.retention == "workqueue":
            groups.append(set(call.seqs) & set(stream.live))
    return groups


def _may_repeat(call: Call) -> bool:
    if isinstance(call, history.Publish):
        return all(message.msg_id for message in call.messages)
    return not isinstance(call, history.Pull | history.Look | _OF_NO_STREAM)


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
