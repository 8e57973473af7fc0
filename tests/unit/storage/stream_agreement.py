"""A stream machine and plain lists side by side: entries go to both, and both are compared."""

from collections.abc import Callable

from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import decode_entry, encode_entry
from contrail_storage.core.id_index import IdHashes
from contrail_storage.core.results import Refused, Result
from contrail_storage.core.stream.deadlines import NO_DEADLINE
from tests.unit.storage.machine_rig import SHARD, Rig, Shelf, hash_of, picture
from tests.unit.storage.naive_models import NaiveStream
from tests.unit.storage.walks import Walk

IDS = [f"id-{number}" for number in range(6)]
COMMANDS_MAX = 4


class StreamAgreement(Walk):
    """A machine, a twin with the commands of the log and other blocks, and a naive stream agree."""

    config: StreamConfig
    naive: NaiveStream
    numbers: dict[str, int]
    """Of consumers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig()
        self.numbers = {}
        self.twin = Rig(Shelf(joined=3))
        self.now_ns = 100
        self.entry: list[cmd.Command] = []
        self.answers: list[Callable[[Result], None]] = []
        self.restarted = False
        self.newest_version = 0

    # Entries -------------------------------------------------------------------------------------

    def do(
        self, command: cmd.Command, check: Callable[[Result], None], leave_open: bool = False
    ) -> None:
        """Put a command into the entry, and apply the entry unless more commands are to come."""
        self.entry.append(command)
        self.answers.append(check)
        if not leave_open or len(self.entry) >= COMMANDS_MAX:
            self.close_entry()

    def close_entry(self) -> None:
        if self.entry:
            results = self.rig.apply(self.now_ns, *self.entry)
            assert repr(results) == repr(self.twin.apply(self.now_ns, *self.logged()))
            for check, result in zip(self.answers, results, strict=True):
                check(result)
        self.entry, self.answers = [], []

    def logged(self) -> list[cmd.Command]:
        """The commands of the entry, as the log has them."""
        pairs = [(SHARD, command) for command in self.entry]
        entry = decode_entry(encode_entry(cmd.Entry(self.now_ns, pairs)))
        return [command for _, command in entry.commands]

    def expect(self, expected: Result) -> Callable[[Result], None]:
        """A check that the answer is ``expected``; of a refusal, its code."""

        def check(result: Result) -> None:
            if isinstance(expected, Refused):
                assert isinstance(result, Refused)
                assert result.code == expected.code
            else:
                assert result == expected

        return check

    def end(self) -> None:
        self.close_entry()
        self.agree()

    # Comparing -----------------------------------------------------------------------------------

    def agree(self) -> None:
        if self.entry:
            return
        self.counters_agree()
        self.messages_and_subjects_agree()
        self.deadlines_agree()
        self.remembered_ids_agree()
        self.consumers_agree()
        self.twin_with_other_blocks_holds_the_same()

    def counters_agree(self) -> None:
        naive, state = self.naive, self.rig.machine.state()
        assert (state.messages, state.bytes) == (len(naive.messages), naive.bytes)
        assert (state.first_seq, state.last_seq) == (naive.first_seq, naive.last_seq)
        assert state.first_ts_ns == (naive.messages[0].time_ns if naive.messages else 0)
        assert state.last_ts_ns == naive.last_time_ns
        assert state.num_deleted == naive.last_seq - naive.first_seq + 1 - len(naive.messages)
        assert state.consumer_count == len(naive.consumers)
        assert self.rig.machine.counters.last_id == hash_of(naive.last_id)

    def messages_and_subjects_agree(self) -> None:
        naive, machine = self.naive, self.rig.machine
        live = {message.seq for message in naive.messages}
        seqs = range(self.config.first_seq, naive.last_seq + 2)
        assert {seq for seq in seqs if machine.is_live(seq)} == live
        names = {message.subject for message in naive.messages}
        assert {name for _, name in machine.subjects.live()} == names
        for name in names:
            own = [message.seq for message in naive.messages if message.subject == name]
            assert machine.subjects.count(name) == len(own)
            last_seq = machine.subjects.last_seq(name)
            assert last_seq == own[-1] or (last_seq > own[-1] and not machine.is_live(last_seq))
            table = machine.subjects
            first = table.first[table.numbered.slot(table.ids[name])]
            assert first <= own[0]

    def deadlines_agree(self) -> None:
        naive, machine = self.naive, self.rig.machine
        assert self.rig.deadline_rows() == naive.deadlines
        earliest_ns = min((key[0] for key in naive.deadlines), default=NO_DEADLINE)
        assert machine.deadlines.earliest_ns <= earliest_ns
        for message in naive.messages:
            assert (message.seq in machine.exempt) == message.never
        assert machine.exempt.total == sum(each.never for each in naive.messages)

    def remembered_ids_agree(self) -> None:
        known = {message_id: seq for message_id, seq, _ in self.naive.ids}
        for message_id in IDS:
            found = self.rig.machine.dedupe.find(IdHashes.of(hash_of(message_id))).tolist()
            assert found == [known.get(message_id, 0)]

    def consumers_agree(self) -> None:
        machine = self.rig.machine
        assert set(machine.consumer_ids) == set(self.naive.consumers)
        for name, naive in self.naive.consumers.items():
            found = machine.consumer(name)
            assert found is not None
            assert found.consumer_id == self.numbers[name]
            if not naive.version:
                # A new consumer: no other has had its version.
                assert found.version > self.newest_version
                naive.version = found.version
            self.newest_version = max(self.newest_version, found.version)
            assert (found.config, found.version) == (naive.config, naive.version)
            position = max(found.next_seq, self.naive.first_seq)
            assert position == max(naive.next_seq, self.naive.first_seq)
            assert found.delivered.consumer_seq == naive.consumer_seq
            assert found.delivered.stream_seq == naive.stream_seq
            pending = {
                seq: (item.consumer_seq, item.attempts, item.deadline_ns)
                for seq, item in found.pending.items()
                if seq >= self.naive.first_seq
            }
            assert pending == {
                seq: (item.consumer_seq, item.attempts, item.deadline_ns)
                for seq, item in naive.pending.items()
                if seq >= self.naive.first_seq
            }
            live = {message.seq for message in self.naive.messages}
            assert set(found.given_up) == naive.given_up & live
            assert (found.floor.consumer_seq, found.floor.stream_seq) == naive.floor
            assert {seq for seq in found.acked_ahead if seq >= position} == {
                seq for seq in naive.settled_ahead if seq >= position
            }
            if found.acked_ahead:
                assert found.acked_top == max(found.acked_ahead)
            else:
                assert found.acked_top < found.next_seq

    def twin_with_other_blocks_holds_the_same(self) -> None:
        assert picture(self.rig.machine, IDS) == picture(self.twin.machine, IDS)
        # After a restart nothing is kept of subjects that are gone; pages then differ in these.
        assert self.restarted or self.rig.store.rows == self.twin.store.rows
