"""Each rule that a cluster's promises rest on, left out: the test of the promise must fail.

The rules of the replicator alone (syncs before answers, pre-votes, rounds for reads) are left out
in its own tests.
"""

from pathlib import Path

import pytest

from contrail_replicator.journal import GroupJournal
from contrail_storage.core.dedupe import DedupeWindow
from contrail_storage.replica.applier import Applier
from contrail_storage.replica.entries import EntryContext
from contrail_storage.replica.groups import Groups
from tests.unit.storage import test_catching_up
from tests.unit.storage import test_cluster as promises

pytestmark = pytest.mark.long


def test_ids_that_only_the_proposer_remembers_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, add = Applier.apply, DedupeWindow.add
    own = False

    def note_whose(applier: Applier, *arguments: object) -> object:
        nonlocal own
        own = isinstance(arguments[-1], EntryContext)
        return apply(applier, *arguments)  # type: ignore[arg-type]

    def add_own(window: DedupeWindow, *arguments: object) -> None:
        if own:
            add(window, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Applier, "apply", note_whose)
    monkeypatch.setattr(DedupeWindow, "add", add_own)
    with pytest.raises(AssertionError, match="220 == 120"):
        promises.test_stream_survives_its_leader_with_ids_consumers_and_acks(tmp_path)


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_reads_that_ask_no_majority_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def confirm_nothing(groups: Groups, number: int) -> None:
        groups.check_led(number)

    monkeypatch.setattr(Groups, "confirm_led", confirm_nothing)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        promises.test_leader_that_is_cut_off_answers_no_read(tmp_path)


def test_members_that_do_not_record_that_they_are_suspect_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note_in_memory(journal: GroupJournal, flags: int) -> None:
        journal._flags = journal._old_flags = flags

    monkeypatch.setattr("contrail_replicator.group._TAIL_BYTES", 1)
    monkeypatch.setattr(GroupJournal, "save_flags", note_in_memory)
    # A whole state after the log's end looks as if the log had lost entries: it is set aside.
    with pytest.raises(AssertionError, match="0 > 0"):
        test_catching_up.test_install_that_a_crash_interrupts_begins_again(tmp_path, monkeypatch)
