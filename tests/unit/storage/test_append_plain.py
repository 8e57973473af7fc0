"""The short way of an append stores what the general way stores."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.stream import append
from tests.unit.storage.machine_rig import Message, Rig, append_of, configure, picture

CONFIG = StreamConfig(name="S", subjects=("a.>",), duplicate_window_ns=5, max_msg_size=400)
IDS = [f"id-{number}" for number in range(30)]

messages = st.builds(
    Message,
    st.sampled_from(["a.1", "a.2", "a.3", "b"]),
    st.binary(max_size=3),
    st.sampled_from([None, {"N": ["v"]}, {"N": ["v", "w"], "\u00e4": ["x" * 500]}]),
    st.none() | st.sampled_from(IDS),
)
batches = st.lists(messages, min_size=1, max_size=6)
entries = st.lists(st.tuples(st.integers(0, 3), st.lists(batches, min_size=1, max_size=3)))


def applied(rig: Rig, time_ns: int, commands: list[cmd.Append]) -> object:
    """The results of an entry, and everything that a restart would find."""
    results = rig.apply(time_ns, *commands)
    return results, dict(rig.store.rows), [vars_of(block) for block in rig.shelf.blocks]


def vars_of(block: append.Block) -> object:
    return (
        block.base_seq,
        block.times_ns.tolist(),
        block.subject_ids.tolist(),
        block.columns,
        block.columns.sizes().tolist(),
    )


@given(entries)
def test_both_ways_write_the_same(script: list[tuple[int, list[list[Message]]]]) -> None:
    short, general = Rig(), Rig()
    for rig in short, general:
        rig.apply(0, configure(CONFIG))
    now_ns = 0
    for later_ns, batches in script:
        now_ns += later_ns
        commands = [append_of(batch) for batch in batches]
        with patch.object(append, "append_plain", return_value=None):
            expected = applied(general, now_ns, commands)
        assert applied(short, now_ns, commands) == expected
        assert picture(short.machine, IDS) == picture(general.machine, IDS)


def test_new_ids_take_the_short_way_and_repeated_ones_do_not() -> None:
    rig = Rig()
    rig.apply(0, configure(CONFIG), append_of([Message("a.1")]))
    new, repeated = ([Message("a.1", msg_id=each) for each in ids] for ids in ("AB", "BC"))
    with patch.object(append, "_append", wraps=append._append) as general:
        rig.apply(1, append_of(new), append_of([Message("a.1", msg_id="D"), Message("a.2")]))
        assert not general.called
        rig.apply(2, append_of(repeated))
        assert general.call_count == 1
