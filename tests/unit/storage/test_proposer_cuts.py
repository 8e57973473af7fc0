"""Where the proposer cuts requests into commands, each of which becomes a block."""

from contrail_common.model import PublishMessage
from contrail_storage.replica import entries
from tests.support.each import each
from tests.unit.storage.test_proposer import Bench, messages, payloads_of, run


@each(("before", "more", "commands"), [(0, 0, [4]), (0, 1, [2, 1, 1]), (1, 0, [2, 2, 1])])
def test_request_is_cut_above_its_own_bound_or_where_it_fills_a_block_up(
    before: int, more: int, commands: list[int]
) -> None:
    async def scene() -> None:
        bench = Bench()
        overhead = 32 + len("a")
        size = entries.ENTRY_BYTES_MAX // 4 - overhead
        if before:
            bench.append(1, messages(before))
        request = [*messages(3, size=size), *messages(1, size=size + more)]
        answers = bench.append(1, request)
        await bench.commit_all()
        found = [len(payloads_of(each)) for one in bench.decoded for _, each in one.commands]
        assert found == commands
        assert [result.seq for result in await answers] == list(range(before + 1, before + 5))

    run(scene())


def test_large_requests_with_ids_fill_an_entry_without_being_cut() -> None:
    async def scene() -> None:
        bench = Bench()
        for request in range(4):
            ids = [f"{request}-{number}" for number in range(1_000)]
            bench.append(1, [PublishMessage("a.b", None, b"x" * 128, msg_id=one) for one in ids])
        await bench.commit_all()
        found = [[len(payloads_of(each)) for _, each in one.commands] for one in bench.decoded]
        assert found == [[1_000, 1_000], [1_000, 1_000]]

    run(scene())
