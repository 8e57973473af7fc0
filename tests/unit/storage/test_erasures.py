"""Receipts of erasures as the meta machine keeps them."""

import pytest

from contrail_common import errors
from contrail_storage.core import commands as cmd
from contrail_storage.core import erasures
from contrail_storage.core.erasures import KEPT_NS, Erasure
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Done, Refused, Result, Writes
from tests.unit.storage.machine_rig import RowStore


class Kept:
    """A meta machine with its rows."""

    def __init__(self) -> None:
        self.meta = MetaMachine()
        self.store = RowStore()

    def apply(self, command: cmd.MetaCommand) -> Result:
        writes = Writes()
        result = self.meta.apply(command, writes)
        self.store.write(writes.rows)
        self.same_after_a_restart()
        return result

    def same_after_a_restart(self) -> None:
        loaded = MetaMachine()
        loaded.erasures.load(self.store.scan(b"E"))
        assert list(loaded.erasures.receipts.items()) == list(self.meta.erasures.receipts.items())

    def record(self, name: str, now_ns: int = 1, nodes: tuple[str, ...] = ("n",)) -> Result:
        return self.apply(cmd.RecordErasure(name, "S", (7,), 3, list(nodes), now_ns))

    def finish(self, *names: str, node: str = "n", now_ns: int = 1) -> None:
        assert self.apply(cmd.FinishErasures(list(names), node, now_ns)) == Done()

    def pending(self, node: str = "n") -> list[str]:
        return [one.erasure_id for one in self.meta.erasures.pending(node)]

    @property
    def known(self) -> list[str]:
        return list(self.meta.erasures.receipts)


def test_receipt_is_done_when_every_node_is() -> None:
    kept = Kept()
    assert kept.record("a", nodes=("n", "m")) == Done()
    assert kept.record("a", nodes=("n", "m")) == Done(changed=False)
    kept.record("b")
    assert kept.pending() == ["a", "b"]
    kept.finish("a", "b", "unknown", now_ns=5)
    assert (kept.pending(), kept.pending("m")) == ([], ["a"])
    receipts = kept.meta.erasures.receipts
    assert receipts["a"] == Erasure("a", "S", (7,), 3, {"n": 5, "m": 0})
    assert (receipts["a"].done_ns, receipts["b"].done_ns) == (0, 5)
    kept.finish("a", node="m", now_ns=9)
    kept.finish("a", node="m", now_ns=11)  # said twice
    assert kept.meta.erasures.receipts["a"].done_ns == 9


def test_node_that_gets_data_of_another_begins_its_pending_receipts_anew() -> None:
    kept = Kept()
    for name in "abc":
        kept.record(name, nodes=("n", "m"))
    kept.finish("a", "b", node="n")
    kept.finish("a", node="m")
    assert kept.apply(cmd.ReopenErasures("x")) == Done(changed=False)
    assert kept.apply(cmd.ReopenErasures("n")) == Done()
    assert (kept.pending("n"), kept.pending("m")) == (["b", "c"], ["b", "c"])
    assert kept.apply(cmd.ReopenErasures("n")) == Done(changed=False)


def test_node_that_lost_its_disk_waits_for_no_index_of_its_lost_log() -> None:
    kept = Kept()
    indexes = {3: 70, 1_024: 90}
    kept.apply(cmd.RecordErasure("a", "S", (7,), 1, ["n", "m"], 1, indexes=indexes))
    assert kept.meta.erasures.reopen("n", Writes(), lost_group=3)
    assert kept.meta.erasures.receipts["a"].indexes == {1_024: 90}
    assert not kept.meta.erasures.reopen("n", Writes(), lost_group=3)


def test_receipts_that_have_been_done_for_a_week_go_and_pending_ones_stay() -> None:
    kept = Kept()
    for name in "abc":
        kept.record(name)
    kept.finish("a", now_ns=1)
    kept.finish("b", now_ns=2)
    assert not kept.meta.erasures.has_old(KEPT_NS)
    assert kept.meta.erasures.has_old(KEPT_NS + 1)
    kept.finish(now_ns=KEPT_NS + 1)
    assert kept.known == ["b", "c"]
    kept.record("d", KEPT_NS + 2)
    assert kept.known == ["c", "d"]


def test_newest_receipts_are_kept_and_pending_ones_never_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures, "RECEIPTS_MAX", 3)
    kept = Kept()
    for name in "abc":
        kept.record(name)
    assert kept.meta.erasures.is_full
    refused = kept.record("d")
    assert isinstance(refused, Refused)
    assert refused.code == errors.ERASURE_LIMIT.code
    kept.finish("b", "c")
    assert not kept.meta.erasures.is_full
    kept.record("d")
    assert kept.known == ["a", "c", "d"]
    kept.record("e")
    assert kept.known == ["a", "d", "e"]
