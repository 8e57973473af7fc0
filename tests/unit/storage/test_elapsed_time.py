"""Jumps of log time: duplicate windows and deadlines of deliveries do not notice them."""

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_common.timeunits import NS_PER_S
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Appended, Result
from tests.unit.storage.archive_rig import packed, records_of, restored
from tests.unit.storage.machine_rig import Message, Rig, append_of, configure

BEGIN_NS = 1_000_000 * NS_PER_S
CONFIG = StreamConfig(name="S", subjects=("a",), duplicate_window_ns=20 * NS_PER_S)
BACKOFF_NS = 5 * NS_PER_S, 9 * NS_PER_S
CONSUMER = ConsumerConfig(
    name="c", durable=True, ack_wait_ns=BACKOFF_NS[0], backoff_ns=BACKOFF_NS, max_deliver=9
)
IDS = "x", "y", "z"
STEPS = st.lists(
    st.tuples(
        st.integers(0, 15),
        st.integers(0, 100_000),
        st.sampled_from(["publish", "deliver", "nak", "wait", "restart"]),
        st.integers(1, 4),
        st.sampled_from(IDS),
    ),
    max_size=25,
)


def begun() -> Rig:
    rig = Rig()
    rig.apply(BEGIN_NS, configure(CONFIG), cmd.PutConsumer(CONSUMER, 1))
    return rig


def take(rig: Rig, time_ns: int, kind: str, seq: int, msg_id: str) -> list[Result]:
    commands: dict[str, cmd.Command] = {
        "publish": append_of([Message("a", b"", None, msg_id)]),
        "deliver": cmd.Deliver(1, 1, [seq], seq + 1),
        "nak": cmd.Acknowledge(1, 1, [], [("nak", seq, 3 * NS_PER_S)]),
        "wait": cmd.Acknowledge(1, 1, [], [("in_progress", seq, 0)]),
    }
    if kind == "restart":
        rig.restart()
        return []
    return rig.apply(time_ns, commands[kind])


def deadlines(rig: Rig) -> dict[int, int]:
    return {seq: one.deadline_ns for seq, one in rig.machine.consumers[1].pending.items()}


@given(STEPS)
def test_jumps_change_no_duplicate_and_no_deadline(
    steps: list[tuple[int, int, str, int, str]],
) -> None:
    """The same history with and without jumps: only the times of the messages differ."""
    plain, jumped = begun(), begun()
    now_ns = BEGIN_NS
    for passed_s, jump_s, *rest in steps:
        now_ns += passed_s * NS_PER_S
        jumped.skipped_ns += jump_s * NS_PER_S
        results = take(plain, now_ns, *rest)
        assert take(jumped, now_ns + jumped.skipped_ns, *rest) == results
        assert deadlines(jumped) == deadlines(plain)


def test_archive_goes_to_a_group_with_other_jumps() -> None:
    rig = begun()
    rig.skipped_ns = 3_600 * NS_PER_S
    now_ns = BEGIN_NS + 3_600 * NS_PER_S
    rig.apply(now_ns, append_of([Message("a", b"", None, "x")]))
    rig.apply(now_ns, cmd.Deliver(1, 1, [1], 2))
    data = packed(records_of(rig))
    for skipped_ns in (0, 70 * NS_PER_S, 5_000 * NS_PER_S):
        other = restored(data, restarts=True, skipped_ns=skipped_ns)
        assert deadlines(other) == {1: now_ns + 5 * NS_PER_S - skipped_ns}
        for later_s, is_known in ((19, True), (20, False)):
            [stored] = other.apply(
                now_ns + later_s * NS_PER_S, append_of([Message("a", b"", None, "x")])
            )
            assert isinstance(stored, Appended)
            assert (stored.exceptions is not None) is is_known
