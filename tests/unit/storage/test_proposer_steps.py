"""Making and applying entries does not hold the event loop for long."""

import itertools

from tests.unit.storage.test_proposer import Bench, messages, run, turn


def test_many_full_entries_are_made_in_several_turns() -> None:
    async def scene() -> None:
        bench = Bench()
        appended = bench.append(1, messages(40, size=64 * 1024))
        made = [0]
        for _ in range(8):
            await turn()
            made.append(len(bench.group.entries))
        assert max(after - before for before, after in itertools.pairwise(made)) <= 4
        # None of them waits for another to be committed.
        assert sum(map(len, bench.group.entries)) > 40 * 64 * 1024
        await bench.commit_all()
        assert [result.seq for result in await appended] == list(range(1, 41))

    run(scene())
