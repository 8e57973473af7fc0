"""How far ``apply`` looks for the last message of a wildcard; the machine's model has the rest."""

import pytest

from contrail_common import errors
from contrail_common.model import Expected, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import decode_entry, encode_entry
from contrail_storage.core.expected import ProvenExpected
from contrail_storage.core.results import Result
from contrail_storage.core.stream import last_matches
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    Outcome,
    Rig,
    Shelf,
    append_of,
    configure,
    outcomes,
    picture,
)
from tests.unit.storage.naive_subjects import naive_matches
from tests.unit.storage.walks import Walk, explore, rule

SUBJECTS = ["a.1", "a.2", "b.1", "b.2", "b.2.x"]
PATTERNS = ["a.*", "b.*", "*.1", "b.>", ">", "c.*"]
UNKNOWN = ("refused", errors.LAST_UNSETTLED.code)
WRONG = ("refused", errors.WRONG_LAST_SEQUENCE.code)


def rig_with(*subjects: str) -> Rig:
    rig = Rig()
    rig.apply(1, configure(StreamConfig(name="S", subjects=("a.>", "b.>"))))
    rig.apply(1, append_of([Message(subject, b"x") for subject in subjects]))
    return rig


def expecting(
    pattern: str, last_seq: int, as_of: int, newest: int, subject: str = "b.n"
) -> Message:
    expected = ProvenExpected(
        last_subject_seq=last_seq, last_subject_seq_subject=pattern, as_of=as_of, newest=newest
    )
    return Message(subject, b"x", expected=expected)


def outcome_of(rig: Rig, message: Message) -> Outcome:
    [result] = rig.apply(2, append_of([message]))
    [outcome] = outcomes(result, 1)
    return outcome


@pytest.mark.parametrize(("seqs_max", "outcome"), [(2, UNKNOWN), (3, ("stored", 5))])
def test_as_many_sequences_are_searched(
    seqs_max: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_matches, "SEQS_MAX", seqs_max)
    rig = rig_with("a.1", "b.1", "b.2", "b.1")
    assert outcome_of(rig, expecting("a.*", 1, as_of=1, newest=1)) == outcome


@pytest.mark.parametrize(("subjects_max", "outcome"), [(1, UNKNOWN), (2, ("stored", 6))])
def test_as_many_subjects_are_compared(
    subjects_max: int, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_matches, "SUBJECTS_MAX", subjects_max)
    rig = rig_with("a.1", "b.1", "b.2", "b.1", "b.2")
    assert outcome_of(rig, expecting("a.*", 1, as_of=1, newest=1)) == outcome


@pytest.mark.parametrize("bound", ["SEQS_MAX", "SUBJECTS_MAX"])
def test_match_within_the_bounds_is_the_last_one(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(last_matches, bound, 2)
    rig = rig_with("b.1", "b.2", "b.3", "a.1", "b.4")
    assert outcome_of(rig, expecting("a.*", 3, as_of=0, newest=0)) == WRONG
    assert outcome_of(rig, expecting("a.*", 4, as_of=0, newest=0)) == ("stored", 6)


def test_removed_message_leaves_the_answer_open_until_another_is_stored() -> None:
    rig = rig_with("a.1", "a.2", "b.1")
    rig.apply(2, cmd.DeleteMessage(2))
    assert outcome_of(rig, expecting("a.*", 1, as_of=3, newest=2)) == UNKNOWN
    rig.apply(2, append_of([Message("a.3", b"x")]))
    assert outcome_of(rig, expecting("a.*", 4, as_of=3, newest=2)) == ("stored", 5)


def test_messages_earlier_in_the_batch_count() -> None:
    rig = rig_with("a.1")
    batch = [
        expecting("a.*", 1, 1, 1, "a.2"),  # 2
        expecting("a.*", 1, 1, 1, "a.3"),  # refused
        expecting("a.>", 2, 0, 0, "b.1"),  # 3
        Message("a.1", b"x"),  # 4
        expecting("a.*", 4, 1, 1, "a.1"),  # 5
        expecting("b.*", 3, 1, 0, "b.2"),  # 6
    ]
    [result] = rig.apply(2, append_of(batch))
    assert outcomes(result, 6) == [
        ("stored", 2),
        WRONG,
        ("stored", 3),
        ("stored", 4),
        ("stored", 5),
        ("stored", 6),
    ]


def test_messages_before_the_first_expectation_of_a_batch_count() -> None:
    rig = rig_with("a.1")
    batch = [Message("a.1", b"x"), Message("a.2", b"x"), Message("a.1", b"x")]
    [result] = rig.apply(2, append_of([*batch, expecting("a.*", 4, 1, 1)]))
    assert outcomes(result, 4)[-1] == ("stored", 5)


def test_expectation_about_a_wildcard_needs_a_proof() -> None:
    rig = rig_with("a.1", "b.1", "a.2", "b.1")
    expected = Expected(last_subject_seq=3, last_subject_seq_subject="a.*")
    assert outcome_of(rig, Message("a.1", b"x", expected=expected)) == UNKNOWN


class Races(Walk):
    """Appends with proofs of various ages, and what removes messages meanwhile."""

    def begin(self) -> None:
        self.rig, self.twin = Rig(), Rig(Shelf(joined=3))
        self.live: dict[int, str] = {}
        self.last_seq = 0
        # (as_of, the newest of each pattern): what leaders found.
        self.found: list[tuple[int, dict[str, int]]] = []
        self.do(configure(StreamConfig(name="S", subjects=(">",))))
        self.look()

    def agree(self) -> None:
        machine = self.rig.machine
        assert [seq for seq in range(1, self.last_seq + 2) if machine.is_live(seq)] == [*self.live]
        assert picture(machine) == picture(self.twin.machine)

    def do(self, command: cmd.Command) -> Result:
        entry = encode_entry(cmd.Entry(2, [(SHARD, command)]))
        [(_, replayed)] = decode_entry(entry).commands
        [result], [same] = self.rig.apply(2, command), self.twin.apply(2, replayed)
        assert repr(result) == repr(same)
        return result

    def last_of(self, pattern: str) -> int:
        matching = [seq for seq, name in self.live.items() if naive_matches(pattern, name)]
        return max(matching, default=0)

    @rule(4)
    def look(self) -> None:
        newest = {pattern: self.last_of(pattern) for pattern in PATTERNS}
        self.found = [*self.found[-3:], (self.last_seq, newest)]

    @rule(4, count=range(1, 5))
    def append(self, count: int) -> None:
        subjects = [self.one_of(SUBJECTS) for _ in range(count)]
        self.do(append_of([Message(subject, b"x") for subject in subjects]))
        for subject in subjects:
            self.last_seq += 1
            self.live[self.last_seq] = subject

    @rule(8, count=range(1, 5), off_by=[0, 0, 1])
    def expect(self, count: int, off_by: int) -> None:
        drawn = [
            (self.one_of(SUBJECTS), self.one_of(PATTERNS), self.one_of(self.found))
            for _ in range(count)
        ]
        searched_to = min(as_of for _, _, (as_of, _) in drawn)
        batch: list[Message] = []
        expected: list[Outcome] = []
        for subject, pattern, (as_of, newest) in drawn:
            last_seq, proven = self.last_of(pattern), newest[pattern]
            batch.append(expecting(pattern, last_seq + off_by, as_of, proven, subject))
            if last_seq <= searched_to and proven and proven not in self.live:
                expected.append(UNKNOWN)
            elif off_by:
                expected.append(WRONG)
            else:
                self.last_seq += 1
                self.live[self.last_seq] = subject
                expected.append(("stored", self.last_seq))
        assert outcomes(self.do(append_of(batch)), count) == expected

    @rule(4)
    def delete(self) -> None:
        if self.live:
            seq = self.one_of([*self.live])
            del self.live[seq]
            self.do(cmd.DeleteMessage(seq))

    @rule(1, count=range(5))
    def purge(self, count: int) -> None:
        to_seq = min([*self.live, self.last_seq + 1]) + count
        self.live = {seq: subject for seq, subject in self.live.items() if seq >= to_seq}
        self.do(cmd.Trim(to_seq, 100))

    @rule(1)
    def restart(self) -> None:
        self.rig.restart()

    def end(self) -> None:
        self.agree()


def test_proofs_of_any_age_give_the_last_message_or_no_answer() -> None:
    explore(Races)
