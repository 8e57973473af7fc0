"""A stream and a consumer as plainly as they can be written: lists, dicts, and no cleverness."""

# One module: the naive stream and its naive consumers look into each other.

import copy
from dataclasses import dataclass, field, replace

from contrail_common import errors
from contrail_common.model import TTL_NEVER, AckKind, ConsumerConfig, Headers, StreamConfig
from tests.unit.storage.machine_rig import Message, Outcome
from tests.unit.storage.naive_subjects import naive_collides, naive_matches


def naive_size(payload: bytes, headers: Headers | None) -> int:
    """Bytes that a message counts for limits."""
    size = len(payload)
    for name, values in (headers or {}).items():
        for value in values:
            size += len(name.encode()) + len(value.encode()) + 4
    return size


@dataclass(frozen=True)
class Stored:
    """A message that is stored."""

    seq: int
    subject: str
    size: int
    time_ns: int
    never: bool = False


class NaiveStream:
    """A list of messages, and a list of the ids stored lately.

    Limits are kept at the end of each append, when all of its messages are in.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.messages: list[Stored] = []
        self.last_seq = config.first_seq - 1
        self.last_time_ns = 0
        self.last_id = ""
        self.ids: list[tuple[str, int, int]] = []
        self.consumers: dict[str, NaiveConsumer] = {}
        self.consumers_made = 0
        self.deadlines: dict[tuple[int, int], list[int]] = {}
        self.pending_recheck = (0, 0)
        self.accepted: list[tuple[str, int]] = []

    @property
    def first_seq(self) -> int:
        """Of the oldest message, or the one that the next message gets."""
        return self.messages[0].seq if self.messages else self.last_seq + 1

    @property
    def bytes(self) -> int:
        """Of all messages."""
        return sum(message.size for message in self.messages)

    def find(self, seq: int) -> Stored | None:
        """The message ``seq``."""
        return next((message for message in self.messages if message.seq == seq), None)

    def last_of(self, pattern: str) -> int:
        """The last sequence of the subjects that match, 0 for none."""
        return max(
            (each.seq for each in self.messages if naive_matches(pattern, each.subject)), default=0
        )

    def tick(self, time_ns: int) -> int:
        """A command arrives: its time, which never runs backwards; old ids are forgotten."""
        now_ns = max(time_ns, self.last_time_ns)
        window_ns = self.config.duplicate_window_ns
        self.ids = [each for each in self.ids if now_ns - each[2] < window_ns]
        return now_ns

    # Appending -----------------------------------------------------------------------------------

    def append(self, time_ns: int, batch: list[Message]) -> list[Outcome]:
        """Take messages one by one, then keep the limits."""
        now_ns = self.tick(time_ns)
        if self.config.sealed:
            return [("refused", errors.STREAM_SEALED.code)] * len(batch)
        return self._append_all(now_ns, batch)

    def append_atomic(self, time_ns: int, batch: list[Message]) -> list[Outcome]:
        """Take all messages or none; then all are refused for the reason of the first."""
        now_ns = self.tick(time_ns)
        if self.config.sealed:
            return [("refused", errors.STREAM_SEALED.code)] * len(batch)
        if not self.config.allow_atomic:
            return [("refused", errors.ATOMIC_DISABLED.code)] * len(batch)
        before = copy.deepcopy(self.__dict__)
        result = self._append_all(now_ns, batch)
        for kind, code in result:
            if kind != "stored":
                self.__dict__.update(before)
                refused = errors.ATOMIC_DUPLICATE.code if kind == "duplicate" else code
                return [("refused", refused)] * len(batch)
        return result

    def _append_all(self, now_ns: int, batch: list[Message]) -> list[Outcome]:
        batch = [self._raised(message) for message in batch]
        self.accepted = [(each.subject, each.size) for each in self.messages]
        result = [self._append_one(now_ns, message) for message in batch]
        stored = [
            (message, seq)
            for message, (kind, seq) in zip(batch, result, strict=True)
            if kind == "stored"
        ]
        for message, _ in stored[:1]:
            if message.rollup == "all":
                self.deadlines.clear()
        kept = [(message, seq) for message, seq in stored if self.find(seq)]
        self._note_deadlines(now_ns, [(message.ttl_ns, seq) for message, seq in kept])
        for message, seq in stored:
            if message.rollup:
                everything = message.rollup == "all"
                self._remove(
                    [
                        each
                        for each in self.messages
                        if each.seq < seq and (everything or each.subject == message.subject)
                    ]
                )
        for subject in {message.subject for message, _ in kept}:
            self._remove(self._over_subject_limit(subject))
        if kept:
            self._evict(len(self.messages))
        return result

    def _raised(self, message: Message) -> Message:
        """The message with a TTL that is no shorter than a marker's."""
        floor_ns, ttl_ns = self.config.subject_delete_marker_ttl_ns, message.ttl_ns
        if ttl_ns is None or self.config.max_msgs_per_subject == 1 or not 0 < ttl_ns < floor_ns:
            return message
        others = [each for each in message.headers or {} if each.lower() != "nats-ttl"]
        headers = {each: (message.headers or {})[each] for each in others}
        headers["Nats-TTL"] = [f"{floor_ns}ns"]
        return replace(message, headers=headers, ttl_ns=floor_ns)

    def _note_deadlines(self, now_ns: int, stored: list[tuple[int | None, int]]) -> None:
        for ttl_ns in {ttl_ns for ttl_ns, _ in stored if ttl_ns is not None and ttl_ns > 0}:
            seqs = [seq for each, seq in stored if each == ttl_ns]
            self.deadlines[now_ns + ttl_ns, seqs[0]] = seqs

    def _over_subject_limit(self, subject: str) -> list[Stored]:
        most = self.config.max_msgs_per_subject
        own = [each for each in self.messages if each.subject == subject]
        return own[: max(len(own) - most, 0)] if most >= 0 else []

    def _remove(self, gone: list[Stored]) -> None:
        self.messages = [each for each in self.messages if each not in gone]
        for consumer in self.consumers.values():
            for each in gone:
                if consumer.pending.pop(each.seq, None):
                    consumer.move_floor(self.last_time_ns)
        self._forget_removed()

    def _append_one(self, now_ns: int, message: Message) -> Outcome:
        size = naive_size(message.payload, message.headers)
        refusal = self._refusal(message, size)
        if isinstance(refusal, tuple):
            return refusal
        self.last_seq += 1
        if self._is_wanted(message.subject):
            never = message.ttl_ns == TTL_NEVER
            self.messages.append(Stored(self.last_seq, message.subject, size, now_ns, never))
        self.accepted = self._with(self.accepted, message, size)
        self.last_time_ns = now_ns
        self.last_id = message.msg_id or ""
        if message.msg_id:
            self.ids.append((message.msg_id, self.last_seq, now_ns))
        return ("stored", self.last_seq)

    def _refusal(self, message: Message, size: int) -> Outcome | None:
        config, expected = self.config, message.expected
        if not any(naive_matches(pattern, message.subject) for pattern in config.subjects):
            return ("refused", errors.SUBJECT_NOT_CAPTURED.code)
        if 0 <= config.max_msg_size < size:
            return ("refused", errors.MESSAGE_TOO_LARGE.code)
        if 0 <= config.max_bytes < size:
            return ("refused", errors.STORE_FAILED.code)
        if expected and expected.stream not in (None, config.name):
            return ("refused", errors.EXPECTED_STREAM.code)
        for known, seq, _ in self.ids:
            if known == message.msg_id:
                return ("duplicate", seq)
        if expected and expected.last_subject_seq is not None:
            pattern = expected.last_subject_seq_subject or message.subject
            if expected.last_subject_seq != self.last_of(pattern):
                return ("refused", errors.WRONG_LAST_SEQUENCE.code)
        if expected and expected.last_seq not in (None, self.last_seq):
            return ("refused", errors.WRONG_LAST_SEQUENCE.code)
        if expected and expected.last_msg_id not in (None, self.last_id):
            return ("refused", errors.WRONG_LAST_MSG_ID.code)
        return self._forbidden(message, size)

    def _forbidden(self, message: Message, size: int) -> Outcome | None:
        config = self.config
        if message.ttl_ns is not None and not config.allow_msg_ttl:
            return ("refused", errors.TTL_DISABLED.code)
        if message.rollup and not config.allow_rollup_hdrs:
            return ("refused", errors.ROLLUP_REFUSED.code)
        full = config.discard == "new" and self._is_full(message, size)
        if full and self._is_wanted(message.subject):
            return ("refused", errors.STORE_FAILED.code)
        return None

    def _is_full(self, message: Message, size: int) -> bool:
        config, before = self.config, self.accepted
        own = sum(subject == message.subject for subject, _ in before)
        at_limit = 0 < config.max_msgs_per_subject <= own
        if at_limit and config.discard_new_per_subject and not message.rollup:
            return True
        after = self._with(before, message, size)
        used, used_after = (sum(each for _, each in held) for held in (before, after))
        return (len(before) < len(after) and 0 <= config.max_msgs < len(after)) or (
            used < used_after and 0 <= config.max_bytes < used_after
        )

    def _with(
        self, held: list[tuple[str, int]], message: Message, size: int
    ) -> list[tuple[str, int]]:
        """What the stream holds, as subjects and sizes, once it has taken a message to ``held``."""
        if message.rollup == "all":
            held = []
        if message.rollup == "sub":
            held = [each for each in held if each[0] != message.subject]
        if not self._is_wanted(message.subject):
            return held
        held = [*held, (message.subject, size)]
        own = [each for each in held if each[0] == message.subject]
        most = self.config.max_msgs_per_subject
        for each in own[: max(len(own) - most, 0)] if most > 0 else []:
            held.remove(each)
        return held

    # Interest and workqueue ----------------------------------------------------------------------

    def _is_wanted(self, subject: str) -> bool:
        return self.config.retention != "interest" or any(
            consumer.matches(subject) for consumer in self.consumers.values()
        )

    def misfit(self, config: ConsumerConfig) -> int:
        """The code of why a workqueue does not take the consumer, or 0."""
        if self.config.retention != "workqueue":
            return 0
        if config.ack_policy != "explicit":
            return errors.WORKQUEUE_ACKS.code
        if config.deliver_policy != "all":
            return errors.WORKQUEUE_DELIVER_ALL.code
        for name, other in self.consumers.items():
            if name == config.name:
                continue
            if not config.filter_subjects:
                return errors.WORKQUEUE_UNFILTERED.code
            if naive_collides(config.filter_subjects, other.config.filter_subjects):
                return errors.WORKQUEUE_NOT_UNIQUE.code
        return 0

    def settle(self, settler: "NaiveConsumer", seqs: set[int], checks_max: int) -> None:
        """Remove what a consumer has settled, unless others need it."""
        if self.config.retention == "limits":
            return
        gone = [each for each in self.messages if each.seq in seqs]
        if self.config.retention == "interest":
            if len(gone) * len(self.consumers) > checks_max:
                self.recheck(gone[0].seq, gone[-1].seq + 1)
                return
            others = [each for each in self.consumers.values() if each is not settler]
            gone = [each for each in gone if not any(one.needs(each) for one in others)]
        self._remove(gone)

    def recheck(self, from_seq: int, end_seq: int) -> None:
        """Have a range of messages looked at by :meth:`keep`."""
        from_seq = max(from_seq, self.first_seq)
        if self.config.retention != "interest" or from_seq >= end_seq:
            return
        if self.pending_recheck[0] < self.pending_recheck[1]:
            from_seq, end_seq = (
                min(from_seq, self.pending_recheck[0]),
                max(end_seq, self.pending_recheck[1]),
            )
        self.pending_recheck = (from_seq, end_seq)

    def shrink(self, consumer: "NaiveConsumer") -> None:
        """A consumer needs less from now on, or it is gone."""
        from_seq = 0 if consumer.config.max_deliver > 0 else consumer.floor[1] + 1
        self.recheck(from_seq, self.last_seq + 1)

    def enforce_interest(self, at_most: int, checks_max: int) -> int:
        """Remove those of some messages of the range that nobody needs; return how many."""
        from_seq, end_seq = self.pending_recheck
        within = [each for each in self.messages if from_seq <= each.seq < end_seq]
        if self.config.retention != "interest":
            self.pending_recheck = (0, 0)
            return 0
        checks = max(min(at_most, checks_max // max(len(self.consumers), 1)), 1)
        if not self.consumers and from_seq <= self.first_seq and end_seq > self.last_seq:
            checks = len(within)
            self.deadlines.clear()
        gone = [
            each
            for each in within[:checks]
            if not any(consumer.needs(each) for consumer in self.consumers.values())
        ]
        self._remove(gone)
        self.pending_recheck = (within[checks].seq, end_seq) if len(within) > checks else (0, 0)
        return len(gone)

    # Removing ------------------------------------------------------------------------------------

    def over_limits(self) -> bool:
        """Whether the oldest message is one too many."""
        config = self.config
        return config.discard == "old" and (
            0 <= config.max_msgs < len(self.messages) or 0 <= config.max_bytes < self.bytes
        )

    def enforce_limits(self, at_most: int) -> tuple[int, bool]:
        """Remove the oldest while a limit is passed: how many, and whether more are to go."""
        removed = self._evict(at_most)
        return removed, self.over_limits()

    def _evict(self, at_most: int) -> int:
        removed = 0
        while removed < at_most and self.over_limits():
            del self.messages[0]
            removed += 1
        self._forget_removed()
        return removed

    def purge_refusal(self, time_ns: int) -> int:
        """The code with which a purge is refused, or 0."""
        self.tick(time_ns)
        if self.config.sealed:
            return errors.STREAM_SEALED.code
        return errors.PURGE_DENIED.code if self.config.deny_purge else 0

    def remove(self, found: list[Stored], *, by_limit: bool = False) -> int:
        """Remove the messages that are still there; ``by_limit``: of each subject the excess."""
        gone = [each for each in found if each in self.messages]
        if by_limit:
            gone = [each for each in gone if each in self._over_subject_limit(each.subject)]
        self._remove(gone)
        return len(gone)

    def expire_age(self, time_ns: int, at_most: int) -> tuple[int, bool]:
        """Remove what is ``max_age`` old, up to the first message that stays."""
        now_ns = self.tick(time_ns)
        if self.config.subject_delete_marker_ttl_ns:
            return 0, False
        aged = self.aged(now_ns)
        return self._remove_oldest(
            [each for each, other in zip(self.messages, aged, strict=False) if each == other],
            at_most,
        )

    def aged(self, now_ns: int) -> list[Stored]:
        """Messages that are ``max_age`` old and were not published to stay."""
        max_age_ns = self.config.max_age_ns
        return [
            each
            for each in self.messages
            if max_age_ns and now_ns - each.time_ns >= max_age_ns and not each.never
        ]

    def expire(
        self,
        time_ns: int,
        seqs: list[int],
        rows: list[tuple[int, int]],
        markers: list[int],
        order: list[str],
    ) -> int:
        """Remove what is due; a subject that has no message left then gets a marker.

        Not one whose last message is of the ``markers``. ``order``: of the subjects by number.
        """
        now_ns = self.tick(time_ns)
        if self.config.sealed or not (rows or seqs):
            return 0
        for row in rows:
            self.deadlines.pop(row, None)
        gone = [each for each in self.messages if each.seq in seqs]
        newest = {each.subject: each.seq for each in gone}
        marked = [name for name in order if name in newest and newest[name] not in markers]
        self._remove(gone)
        left = {each.subject for each in self.messages}
        marker_ttl_ns = self.config.subject_delete_marker_ttl_ns
        headers = {"Nats-Marker-Reason": ["MaxAge"], "Nats-TTL": [f"{marker_ttl_ns}ns"]}
        size = naive_size(b"", headers)
        stored: list[tuple[int | None, int]] = []
        bytes_before = self.bytes
        for name in [name for name in marked if name not in left] if marker_ttl_ns else []:
            full = 0 <= self.config.max_bytes < bytes_before + (len(stored) + 1) * size
            if self.config.discard == "new" and full:
                break
            self.last_seq += 1
            self.last_id, self.last_time_ns = "", now_ns
            self.messages.append(Stored(self.last_seq, name, size, now_ns))
            stored.append((marker_ttl_ns, self.last_seq))
        self._note_deadlines(now_ns, stored)
        if stored:
            self._evict(len(self.messages))
        return len(gone)

    def trim(self, time_ns: int, to_seq: int, at_most: int) -> tuple[int, bool] | int:
        """Purge below a sequence, or everything; an int is the code of the refusal."""
        self.tick(time_ns)
        if self.config.sealed:
            return errors.STREAM_SEALED.code
        if self.config.deny_purge:
            return errors.PURGE_DENIED.code
        below = [message for message in self.messages if message.seq < to_seq]
        everything = to_seq > self.last_seq
        if everything:
            self.deadlines.clear()
        return self._remove_oldest(below, len(below) if everything else at_most)

    def _remove_oldest(self, chosen: list[Stored], at_most: int) -> tuple[int, bool]:
        gone = chosen[: max(at_most, 0)]
        self.messages = [message for message in self.messages if message not in gone]
        self._forget_removed()
        return len(gone), len(gone) < len(chosen)

    def _forget_removed(self) -> None:
        for consumer in self.consumers.values():
            consumer.forget_below(self.first_seq)
            consumer.move_floor(self.last_time_ns)

    def delete(self, time_ns: int, seq: int) -> int:
        """Remove one message; the code of the refusal, or 0."""
        now_ns = self.tick(time_ns)
        if self.config.sealed:
            return errors.STREAM_SEALED.code
        if self.config.deny_delete:
            return errors.DELETE_DENIED.code
        message = self.find(seq)
        if message is None:
            return errors.SEQUENCE_NOT_FOUND.code
        self.messages.remove(message)
        for consumer in self.consumers.values():
            if consumer.pending.pop(seq, None):
                consumer.move_floor(now_ns)
        return 0


@dataclass
class NaivePending:
    """A delivery that is not acknowledged."""

    consumer_seq: int
    attempts: int
    deadline_ns: int


@dataclass
class NaiveConsumer:
    """Where a consumer stands."""

    config: ConsumerConfig
    next_seq: int
    version: int = 0
    consumer_seq: int = 0
    floor: tuple[int, int] = (0, 0)
    pending: dict[int, NaivePending] = field(default_factory=dict)
    settled_ahead: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.stream_seq = self.next_seq - 1
        self.floor = (0, self.stream_seq)

    def matches(self, subject: str) -> bool:
        """Whether its filter does."""
        filters = self.config.filter_subjects
        return not filters or any(naive_matches(each, subject) for each in filters)

    def needs(self, message: Stored) -> bool:
        """Whether it has not settled a message that it is to have."""
        to_come = message.seq >= self.next_seq and message.seq not in self.settled_ahead
        kept = message.seq in self.pending or message.seq in self.given_up
        return self.matches(message.subject) and (to_come or kept)

    def ack_wait_ns(self, attempt: int) -> int:
        """The pause before the next delivery."""
        if self.config.backoff_ns:
            return [*self.config.backoff_ns, *[self.config.backoff_ns[-1]] * attempt][attempt - 1]
        return self.config.ack_wait_ns

    def reconfigure(self, config: ConsumerConfig) -> None:
        """What is pending is due as if the new waiting times had held before."""
        if (config.max_deliver or -1) < 0 or config.max_deliver > self.config.max_deliver:
            self.given_up.clear()
        before = {seq: self.ack_wait_ns(item.attempts) for seq, item in self.pending.items()}
        self.config = config
        for seq, item in self.pending.items():
            item.deadline_ns += self.ack_wait_ns(item.attempts) - before[seq]

    def give_up(self, seqs: list[int]) -> None:
        """Let go of deliveries; those that were the last allowed are remembered."""
        for seq in seqs:
            item = self.pending.pop(seq, None)
            if item and 0 < self.config.max_deliver <= item.attempts:
                self.given_up.add(seq)
                if seq >= self.next_seq:
                    self.settled_ahead.add(seq)

    def forget_all_but(self, live: set[int]) -> None:
        """What is not in the stream is not pending either."""
        self.pending = {seq: item for seq, item in self.pending.items() if seq in live}

    def forget_below(self, first_seq: int) -> None:
        """The stream now begins at ``first_seq``."""
        self.pending = {seq: item for seq, item in self.pending.items() if seq >= first_seq}

    def move_floor(self, _now_ns: int) -> None:
        """The floor is below the oldest pending delivery, else at the newest one."""
        if self.pending:
            oldest = min(self.pending)
            floor = (self.pending[oldest].consumer_seq - 1, oldest - 1)
        else:
            floor = (self.consumer_seq, self.stream_seq)
        if floor[1] > self.floor[1]:
            self.floor = floor

    def deliver(self, now_ns: int, seqs: list[int], position: int) -> set[int]:
        """Record deliveries: what is settled by them."""
        settled = set()
        for seq in seqs:
            self.consumer_seq += 1
            self.stream_seq = max(self.stream_seq, seq)
            if seq in self.pending:
                item = self.pending[seq]
                item.attempts += 1
                item.deadline_ns = now_ns + self.ack_wait_ns(item.attempts)
            elif seq >= self.next_seq:
                if self.config.ack_policy == "none":
                    settled.add(seq)
                elif seq not in self.settled_ahead:
                    self.pending[seq] = NaivePending(
                        self.consumer_seq, 1, now_ns + self.ack_wait_ns(1)
                    )
        self.next_seq = max(self.next_seq, position)
        self.move_floor(now_ns)
        return settled

    def advance(self, consumer_seq: int, stream_seq: int, position: int) -> None:
        """Note how far it was given messages; it never goes back."""
        self.consumer_seq = max(self.consumer_seq, consumer_seq)
        self.stream_seq = max(self.stream_seq, stream_seq)
        self.next_seq = max(self.next_seq, position)

    def acknowledge(self, now_ns: int, kind: AckKind, seq: int, delay_ns: int) -> set[int]:
        """Take one acknowledgement: what it settles. Its command moves the floor at its end."""
        settled = set()
        if kind in ("ack", "term"):
            lower = [each for each in self.pending if each < seq]
            for each in [
                *(lower if kind == "ack" and self.config.ack_policy == "all" else []),
                seq,
            ]:
                late = each == seq and each in self.given_up
                if self.pending.pop(each, None) or each >= self.next_seq or late:
                    settled.add(each)
                    self.given_up.discard(each)
                if each >= self.next_seq:
                    self.settled_ahead.add(each)
            if kind == "ack" and self.config.ack_policy == "all" and seq >= self.next_seq:
                self.next_seq = seq + 1
                self.stream_seq = max(self.stream_seq, seq)
        elif seq in self.pending:
            item = self.pending[seq]
            pause_ns = delay_ns if kind == "nak" else self.ack_wait_ns(item.attempts)
            item.deadline_ns = now_ns + pause_ns
        return settled
