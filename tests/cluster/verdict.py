"""Checks that the final state of a run agrees with the answers that its clients got."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from contrail_client import StoredMessage
from tests.cluster.journal import Journal, Sent

_SHOWN = 5


def problems(
    journal: Journal,
    stored: Sequence[StoredMessage],
    replayed: Sequence[StoredMessage],
    *,
    eager_consumer: str,
) -> list[str]:
    """All broken promises, with a few examples. `eager_consumer` must have got all messages."""
    by_seq = {message.seq: message for message in stored}
    checks: dict[str, Sequence[object]] = {
        "acknowledged and lost": _lost(journal, by_seq),
        "acknowledged under two sequences": _moved(journal),
        "stored more than once": _doubled(stored),
        "stored and never sent": _invented(journal, stored),
        "refused and stored": _refused(journal, stored),
        "missing sequences": _gaps(stored),
        "stored out of a publisher's order": _disordered(journal, stored),
        "delivered again after a confirmed acknowledgement": _redelivered(journal),
        "delivered with other content": _falsified(journal, by_seq),
        "never delivered": _undelivered(journal, eager_consumer),
        "replayed differently": _replay_differences(stored, replayed),
    }
    return [
        f"{name}: {len(found)}, such as {found[:_SHOWN]}" for name, found in checks.items() if found
    ]


def _acknowledged(journal: Journal) -> Iterator[tuple[str, Sent]]:
    return ((name, entry) for name, entry in journal.sent.items() if entry.seqs)


def _id_of(message: StoredMessage) -> str:
    return message.headers["Nats-Msg-Id"][0]


def _lost(journal: Journal, by_seq: dict[int, StoredMessage]) -> list[str]:
    return [
        f"{name} at {seq}"
        for name, entry in _acknowledged(journal)
        for seq in entry.seqs
        if seq not in by_seq or not _is(by_seq[seq], name, entry)
    ]


def _is(message: StoredMessage, name: str, entry: Sent) -> bool:
    sent = entry.message
    return (_id_of(message), message.subject, message.payload) == (name, sent.subject, sent.payload)


def _moved(journal: Journal) -> list[str]:
    return [
        f"{name} at {entry.seqs}" for name, entry in journal.sent.items() if len(entry.seqs) > 1
    ]


def _doubled(stored: Iterable[StoredMessage]) -> list[str]:
    return [name for name, count in Counter(map(_id_of, stored)).items() if count > 1]


def _invented(journal: Journal, stored: Iterable[StoredMessage]) -> list[int]:
    return [
        message.seq
        for message in stored
        if (entry := journal.sent.get(_id_of(message))) is None
        or not _is(message, _id_of(message), entry)
    ]


def _refused(journal: Journal, stored: Iterable[StoredMessage]) -> list[str]:
    refused = {name for name, entry in journal.sent.items() if entry.refused and not entry.seqs}
    return sorted(refused & set(map(_id_of, stored)))


def _gaps(stored: Sequence[StoredMessage]) -> list[int]:
    seqs = [message.seq for message in stored]
    return sorted(set(range(1, max(seqs, default=0) + 1)) ^ set(seqs))


def _disordered(journal: Journal, stored: Iterable[StoredMessage]) -> list[str]:
    newest: dict[str, int] = {}
    found = []
    for message in sorted(stored, key=lambda message: message.seq):
        entry = journal.sent.get(_id_of(message))
        if entry is None:
            continue
        if entry.number < newest.get(entry.publisher, 0):
            found.append(f"{_id_of(message)} at {message.seq}")
        newest[entry.publisher] = entry.number
    return found


def _redelivered(journal: Journal) -> list[str]:
    return [
        f"{one.seq} to {one.consumer}"
        for one in journal.deliveries
        if one.asked_s > journal.settled_s.get((one.consumer, one.seq), float("inf"))
    ]


def _falsified(journal: Journal, by_seq: dict[int, StoredMessage]) -> list[str]:
    return [
        f"{one.seq} to {one.consumer}"
        for one in journal.deliveries
        if one.seq not in by_seq or by_seq[one.seq].payload != one.payload
    ]


def _undelivered(journal: Journal, consumer: str) -> list[int]:
    got = {one.seq for one in journal.deliveries if one.consumer == consumer}
    return sorted({min(entry.seqs) for _, entry in _acknowledged(journal)} - got)


def _replay_differences(
    stored: Sequence[StoredMessage], replayed: Sequence[StoredMessage]
) -> list[int]:
    first = {message.seq: (message.subject, message.payload) for message in stored}
    second = {message.seq: (message.subject, message.payload) for message in replayed}
    different = {seq for seq in first.keys() | second.keys() if first.get(seq) != second.get(seq)}
    return sorted(different) or ([0] if len(stored) != len(replayed) else [])
