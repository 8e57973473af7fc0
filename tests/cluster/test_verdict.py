"""The verdict names every planted anomaly of a run, and nothing for a sound run."""

from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from contrail_client import Message, StoredMessage
from tests.cluster.journal import Delivered, Journal, Sent
from tests.cluster.verdict import problems

MESSAGES: Final = 6
CONSUMER: Final = "all"

Run = tuple[Journal, list[StoredMessage], list[StoredMessage]]


def sound_run() -> Run:
    """A run of two publishers in turn; everything is stored, delivered and settled."""
    journal = Journal()
    stored = []
    for seq in range(1, MESSAGES + 1):
        publisher, number = f"p{seq % 2}", (seq + 1) // 2
        name = f"{publisher}-{number}"
        entry = Sent(publisher, number, Message(f"load.{publisher}", name.encode(), None, name))
        journal.sending([entry])
        journal.answered(entry, seq)
        journal.delivered([Delivered(CONSUMER, seq, name.encode(), 0.0)])
        headers = {"Nats-Msg-Id": [name]}
        subject = entry.message.subject
        stored.append(
            StoredMessage(stream="S", seq=seq, subject=subject, time="", headers=headers, data=name)
        )
    journal.settled(CONSUMER, [1, 2, 3])
    return journal, stored, list(stored)


def judge(run: Run) -> list[str]:
    journal, stored, replayed = run
    return problems(journal, stored, replayed, eager_consumer=CONSUMER)


def losing(run: Run) -> None:
    for messages in run[1:]:
        del messages[-1]


def renumbering(run: Run) -> None:
    for messages in run[1:]:
        first, second = messages[:2]
        messages[:2] = [
            msgspec.structs.replace(second, seq=1),
            msgspec.structs.replace(first, seq=2),
        ]


def moving(run: Run) -> None:
    run[0].answered(run[0].sent["p1-1"], MESSAGES)


def doubling(run: Run) -> None:
    for messages in run[1:]:
        messages.append(msgspec.structs.replace(messages[0], seq=MESSAGES + 1))


def inventing(run: Run) -> None:
    for messages in run[1:]:
        messages.append(
            msgspec.structs.replace(
                messages[0], seq=MESSAGES + 1, headers={"Nats-Msg-Id": ["nobody-1"]}
            )
        )


def refusing(run: Run) -> None:
    entry = run[0].sent["p0-3"]
    entry.seqs.clear()
    entry.refused = True


def leaving_a_gap(run: Run) -> None:
    for messages in run[1:]:
        messages[-1] = msgspec.structs.replace(messages[-1], seq=MESSAGES + 5)


def disordering(run: Run) -> None:
    first, third = run[0].sent["p1-1"], run[0].sent["p1-2"]
    first.number, third.number = third.number, first.number


def redelivering(run: Run) -> None:
    after_s = run[0].settled_s[CONSUMER, 1] + 1
    run[0].delivered([Delivered(CONSUMER, 1, b"p1-1", after_s)])


def falsifying(run: Run) -> None:
    run[0].delivered([Delivered(CONSUMER, 5, b"other", 0.0)])


def skipping(run: Run) -> None:
    del run[0].deliveries[-1]


def replaying_less(run: Run) -> None:
    del run[2][2]


ANOMALIES: dict[str, Callable[[Run], None]] = {
    "acknowledged and lost": losing,
    "acknowledged and lost: 2": renumbering,
    "acknowledged under two sequences": moving,
    "stored more than once": doubling,
    "stored and never sent": inventing,
    "refused and stored": refusing,
    "missing sequences": leaving_a_gap,
    "stored out of a publisher's order": disordering,
    "delivered again after a confirmed acknowledgement": redelivering,
    "delivered with other content": falsifying,
    "never delivered": skipping,
    "replayed differently": replaying_less,
}


def test_sound_run_has_no_problems() -> None:
    assert judge(sound_run()) == []


@pytest.mark.parametrize("sentence", ANOMALIES)
def test_planted_anomaly_is_named(sentence: str) -> None:
    run = sound_run()
    ANOMALIES[sentence](run)
    assert any(problem.startswith(sentence) for problem in judge(run)), judge(run)
