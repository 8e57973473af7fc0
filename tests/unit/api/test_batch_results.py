"""What is told of each message: in order, and in the words of the declared result."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_api.publishing.results import (
    BatchResult,
    BatchResults,
    BatchRuns,
    Result,
    all_stored,
    encode_lines,
    encode_results,
    encode_runs,
    results_of,
)
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.problems import problem, result_problem
from contrail_link.contract.publish import PubResult

REFUSED = ApiError(errors.INVALID_SUBJECT)
WRONG = PubResult(0, code=10071, detail="wrong last sequence: 5", count=2)


def told(result: PubResult | ApiError) -> BatchResult:
    """The declared result of one message."""
    if isinstance(result, ApiError):
        return BatchResult(problem=problem(result))
    if result.code:
        return BatchResult(problem=result_problem(result.code, result.detail))
    shard = msgspec.UNSET if result.shard is None else result.shard
    return BatchResult(result.seq, result.duplicate, shard=shard)


def one_by_one(results: list[Result]) -> list[Result]:
    return [
        each for run in results for each in ([run] if isinstance(run, ApiError) else run.each())
    ]


runs = st.builds(
    PubResult,
    st.integers(1, 1 << 62) | st.integers(1, 6),
    st.booleans(),
    count=st.integers(1, 5),
    shard=st.none() | st.integers(0, 63),
) | st.sampled_from([WRONG, REFUSED])


@given(st.lists(runs, max_size=5))
def test_runs_of_results_are_encoded_like_single_results(results: list[Result]) -> None:
    expected = [told(each) for each in one_by_one(results)]
    assert encode_results(results) == msgspec.json.encode(BatchResults(expected))
    assert encode_lines(results) == msgspec.json.Encoder().encode_lines(expected)


@given(st.lists(runs, max_size=5))
def test_runs_in_msgpack_say_the_same_and_are_as_long_as_possible(results: list[Result]) -> None:
    found = msgspec.msgpack.decode(encode_runs(results), type=BatchRuns).runs
    said: list[BatchResult] = []
    for run in found:
        for at in range(run.count):
            if isinstance(run.first_seq, int):
                said.append(BatchResult(run.first_seq + at, run.duplicate, shard=run.shard))
            else:
                said.append(BatchResult(problem=run.problem))
    assert said == [told(each) for each in one_by_one(results)]
    for run, after in pairwise(found):
        if isinstance(run.first_seq, int):
            end = (run.first_seq + run.count, run.duplicate, run.shard)
            assert end != (after.first_seq, after.duplicate, after.shard)
        else:
            assert run.problem != after.problem


@given(st.lists(st.none() | st.booleans(), max_size=12))
def test_results_keep_the_order_of_the_messages(script: list[bool | None]) -> None:
    """None is refused at the edge, False by storage, True is stored."""
    refused = {at: REFUSED for at, step in enumerate(script) if step is None}
    answered: list[PubResult] = []
    seq = 0
    for step in script:
        if step:
            seq += 1
        if step is not None:
            answered.append(PubResult(seq) if step else PubResult(0, code=10071))
    found = one_by_one(results_of(refused, answered))
    assert [None if isinstance(each, ApiError) else not each.code for each in found] == script
    assert [each.seq for each in found if isinstance(each, PubResult) and not each.code] == list(
        range(1, seq + 1)
    )
    assert all_stored(results_of(refused, answered)) == all(script)


def test_run_is_split_where_a_message_was_refused() -> None:
    results = results_of({1: REFUSED}, [PubResult(7, count=3)])
    assert results == [PubResult(7), REFUSED, PubResult(8), PubResult(9)]


@pytest.mark.parametrize("duplicate", [False, True])
def test_stored_and_duplicate_messages_are_both_in_the_stream(duplicate: bool) -> None:
    assert all_stored([PubResult(5, duplicate, count=2)])
    assert not all_stored([PubResult(5, duplicate), WRONG])
