"""Each checker of a run names every anomaly that is planted, and nothing in a sound run."""

from collections.abc import Callable
from typing import Final

import pytest

from contrail_client import StoredMessage
from contrail_storage.core.chain import Chain
from tests.chaos import plain, queues, registers, replicas
from tests.chaos.plain import Publish
from tests.chaos.queues import MAX_DELIVER, STREAM, TRIES, Got, Work
from tests.chaos.registers import History, Read, Write

# Registers ---------------------------------------------------------------------------------------

REG: Final = "reg.0"
Registers = tuple[History, list[StoredMessage]]


def stored(seq: int, value: str) -> StoredMessage:
    return StoredMessage(stream="S", seq=seq, subject=REG, time="", data=value)


def sound_registers() -> Registers:
    """Three writes one after the other, a read after each, a mismatch, and an unknown write."""
    history = History()
    for seq in (1, 2, 3):
        at_s = 10.0 * seq
        history.writes.append(Write(REG, seq - 1, f"v{seq}", at_s, "stored", seq, at_s + 1))
        history.reads.append(Read(REG, seq, f"v{seq}", at_s + 2, at_s + 3))
    history.writes.append(Write(REG, 1, "late", 35.0, "mismatch", 0, 36.0))
    history.writes.append(Write(REG, 3, "unknown", 37.0))
    return history, [stored(1, "v1"), stored(2, "v2"), stored(3, "v3"), stored(4, "unknown")]


def lost_write(run: Registers) -> None:
    del run[1][2:]


def write_stored_twice(run: Registers) -> None:
    run[1].append(stored(5, "v1"))


def refused_write_stored(run: Registers) -> None:
    run[0].writes[-2].expected = 4
    run[1].append(stored(5, "late"))


def lost_update(run: Registers) -> None:
    run[0].writes[-1].expected = 2


def mismatch_for_no_reason(run: Registers) -> None:
    run[0].writes[-2].expected = 3
    del run[1][3]


def stale_read(run: Registers) -> None:
    run[0].reads.append(Read(REG, 2, "v2", 32.0, 34.0))


def read_after_a_newer_read(run: Registers) -> None:
    run[0].writes[2].answered_s = float("inf")
    run[0].writes[2].outcome = "unknown"
    stale_read(run)
    run[0].reads[-1].asked_s = 33.5


def read_of_another_value(run: Registers) -> None:
    run[0].reads.append(Read(REG, 3, "v9", 34.0, 35.0))


def read_from_the_future(run: Registers) -> None:
    run[0].reads.append(Read(REG, 3, "v3", 5.0, 6.0))


def overtaken_write(run: Registers) -> None:
    run[0].writes[1].asked_s, run[0].writes[1].answered_s = 45.0, 46.0


def value_of_nobody(run: Registers) -> None:
    run[1].append(stored(5, "v9"))


REGISTERS: Final[dict[str, Callable[[Registers], None]]] = {
    "v3 was acknowledged at 3, is at None": lost_write,
    "a write was stored twice": write_stored_twice,
    "late was refused (mismatch), is at 5": refused_write_stored,
    "unknown replaced 3, and expected 2": lost_update,
    "late was refused, although nothing had changed": mismatch_for_no_reason,
    "a read found 2, although 3 was known": stale_read,
    "found 2, although 3 was known": read_after_a_newer_read,
    "a read found v9 at 3, where v3 is stored": read_of_another_value,
    "a read found v3 before it was written": read_from_the_future,
    "v2 at 2 is before what was there already": overtaken_write,
    "nobody wrote v9": value_of_nobody,
}


def test_sound_registers_have_no_problems() -> None:
    assert registers.problems(*sound_registers()) == []


@pytest.mark.parametrize("sentence", REGISTERS)
def test_anomaly_of_registers_is_named(sentence: str) -> None:
    run = sound_registers()
    REGISTERS[sentence](run)
    found = registers.problems(*run)
    assert any(sentence in one for one in found), found


# Publishers without ids --------------------------------------------------------------------------

Plain = tuple[list[Publish], dict[int, str]]


def sound_publishes() -> Plain:
    publishes = [
        Publish(("a",), "stored", 1),
        Publish(("b1", "b2"), "stored", 2),
        Publish(("c",), "refused"),
        Publish(("d1", "d2"), "unknown"),
        Publish(("e",), "unknown"),
    ]
    return publishes, {1: "a", 2: "b1", 3: "b2", 4: "d1", 5: "d2"}


PLAIN: Final[dict[str, dict[int, str]]] = {
    "a is not at 1": {1: "e"},
    "a is stored 2 times": {6: "a"},
    "b1 is not at 2": {2: "b2", 3: "b1"},
    "c was refused, and is stored": {6: "c"},
    "only ['d1'] are stored": {5: "e"},
    "nobody sent x": {6: "x"},
}


def test_sound_publishes_have_no_problems() -> None:
    assert plain.problems(*sound_publishes()) == []


@pytest.mark.parametrize("sentence", PLAIN)
def test_anomaly_of_publishes_is_named(sentence: str) -> None:
    publishes, there = sound_publishes()
    found = plain.problems(publishes, there | PLAIN[sentence])
    assert any(sentence in one for one in found), found


# Work queues -------------------------------------------------------------------------------------

Queue = tuple[Work, dict[int, str], dict[int, str]]


def sound_work() -> Queue:
    """One message that was settled, one that is still there, one that was tried in vain."""
    work = Work({f"{STREAM} a": 1, f"{STREAM} b": 2, f"{TRIES} t": 1})
    work.got = [Got(STREAM, 1, "a", 1, 1.0), Got(STREAM, 2, "b", 1, 1.0)]
    work.got += [Got(TRIES, 1, "t", attempt, 1.0) for attempt in range(1, MAX_DELIVER + 1)]
    work.settling, work.settled_s = {1}, {1: 2.0}
    return work, {2: "b"}, {1: "t"}


def redelivered(run: Queue) -> None:
    run[0].got.append(Got(STREAM, 1, "a", 2, 3.0))


def tried_too_often(run: Queue) -> None:
    run[0].got.append(Got(TRIES, 1, "t", 1, 3.0))


def counted_too_far(run: Queue) -> None:
    run[0].got[-1].attempt = MAX_DELIVER + 1


def kept(run: Queue) -> None:
    run[1][1] = "a"


def lost(run: Queue) -> None:
    del run[1][2]


def lost_try(run: Queue) -> None:
    del run[2][1]


QUEUES: Final[dict[str, Callable[[Queue], None]]] = {
    "1 came again after its sync acknowledgement": redelivered,
    "1 was delivered 4 times": tried_too_often,
    "1 was delivered as attempt 4": counted_too_far,
    "1 was acknowledged, and is still there": kept,
    "QUEUE b at 2 is gone, and nobody acknowledged it": lost,
    "TRIES t is not at 1": lost_try,
}


def test_sound_work_has_no_problems() -> None:
    assert queues.problems(*sound_work()) == []


@pytest.mark.parametrize("sentence", QUEUES)
def test_anomaly_of_work_is_named(sentence: str) -> None:
    run = sound_work()
    QUEUES[sentence](run)
    found = queues.problems(*run)
    assert any(sentence in one for one in found), found


# Replicas ----------------------------------------------------------------------------------------


def test_replicas_are_compared_at_one_index() -> None:
    one, other = Chain(0, b"1" * 16), Chain(0, b"2" * 16)
    assert replicas.different({"n1": {7: (5, one)}, "n2": {7: (6, other)}}) == []
    assert replicas.different({"n1": {7: (5, one)}, "n2": {7: (5, one)}}) == []
    found = replicas.different({"n1": {7: (5, one)}, "n2": {7: (5, other)}, "n3": {7: (5, one)}})
    assert found == ["group 7 differs at entry 5: n1 n3 | n2"]
