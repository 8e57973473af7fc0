"""Incarnations and starts of nodes, as the meta machine decides them."""

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Done, Refused, Writes
from contrail_storage.replica.loading import load_meta
from tests.unit.storage.machine_rig import RowStore


def start(boots: int, process: int, incarnation: int = 1, number: int = 2) -> cmd.NoteStart:
    return cmd.NoteStart("b", number, incarnation, boots, process)


def register(token: bytes, above: int, number: int = 2) -> cmd.RegisterNode:
    return cmd.RegisterNode("b", number, token, above)


def outcomes(machine: MetaMachine, *commands: cmd.MetaCommand) -> list[bool | int]:
    """Whether each command changed something; the code of a refusal."""
    found: list[bool | int] = []
    for command in commands:
        result = machine.apply(command, Writes())
        assert isinstance(result, (Done, Refused))
        found.append(result.code if isinstance(result, Refused) else result.changed)
    return found


REFUSED = errors.PRECONDITION_FAILED.code


def test_a_start_that_is_not_the_newest_is_refused() -> None:
    machine = MetaMachine()
    commands = [
        start(3, 30),
        start(3, 30),  # told again
        start(4, 40),
        start(4, 41),  # a copy of the folder
        start(3, 30),  # a folder that was set back
        start(5, 50, incarnation=2),  # nobody has registered it
        start(5, 50, number=3),
    ]
    assert outcomes(machine, *commands) == [True, False, True, *[REFUSED] * 4]
    assert machine.node_table.nodes["b"].boots == 4


def test_each_loss_of_a_disk_is_registered_once() -> None:
    machine = MetaMachine()
    machine.next_shard_id = 7
    commands = [
        start(9, 90),
        register(b"first", 1),
        register(b"first", 1),  # asked at another node
        start(9, 91),  # of the lost disk
        start(1, 10, incarnation=2),
        register(b"late", 1),  # of an earlier process, under way for long
        register(b"second", 2),
        register(b"other", 3, number=3),
    ]
    expected = [True, True, False, REFUSED, True, REFUSED, True, REFUSED]
    assert outcomes(machine, *commands) == expected
    assert machine.node_table.incarnation("b") == 3
    assert machine.node_table.incarnation("c") == 1


def test_shards_of_a_lost_disk_are_those_that_existed_then() -> None:
    machine = MetaMachine()
    machine.next_shard_id = 7
    outcomes(machine, register(b"first", 1))
    table = machine.node_table
    assert [table.loser_of(shard_id, 2) for shard_id in (1, 6, 7)] == ["b", "b", ""]
    assert [table.loser_of(1, group) for group in (1, 3, 1024)] == ["", "", ""]


def test_a_group_knows_in_which_incarnation_its_members_have_begun() -> None:
    machine = MetaMachine()
    members = ("a", "b", "c")
    assert outcomes(machine, cmd.CreateGroup(1024, members)) == [True]
    outcomes(machine, register(b"first", 1))
    # Made again by the next leader, and another one that is new.
    commands = cmd.CreateGroup(1024, members), cmd.CreateGroup(1025, members)
    assert outcomes(machine, *commands) == [False, True]
    groups = machine.group_table.groups
    assert [groups[1024].incarnation_of(one) for one in members] == [1, 1, 1]
    assert [groups[1025].incarnation_of(one) for one in members] == [1, 2, 1]


def test_nodes_are_there_after_a_restart() -> None:
    rows, machine, loaded = RowStore(), MetaMachine(), MetaMachine()
    for command in (start(3, 30), register(b"first", 1), start(1, 10, incarnation=2)):
        writes = Writes()
        machine.apply(command, writes)
        rows.write(writes.rows)
    load_meta(rows.scan, loaded)
    assert loaded.node_table.nodes == machine.node_table.nodes
    assert keys.NODE == b"U"  # stored by this number
