"""Expectations about wildcards beside many subjects: no step holds the event loop for long."""

import itertools
from pathlib import Path

import pytest

from contrail_common.model import Expected, PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.support.slices import assert_no_stall
from tests.unit.storage.test_stalls import play, publish_all

SUBJECTS = 200_000
EXPECTING = 20


@pytest.mark.long
def test_expectations_of_wildcards_on_many_subjects(tmp_path: Path) -> None:
    """A batch of 20 on 200,000 subjects: for a pattern with many matches, and for one each."""

    async def scene(link: LocalLink) -> None:
        await link.put_stream(StreamConfig(name="S", subjects=("s.>",)), "create", None, False)
        sequences = itertools.count(1)

        async def expect(patterns: list[str], last_seqs: list[int]) -> None:
            messages = [
                PublishMessage(
                    "s.new.x",
                    None,
                    b"x",
                    expected=Expected(last_subject_seq=seq, last_subject_seq_subject=pattern),
                )
                for pattern, seq in zip(patterns, last_seqs, strict=True)
            ]
            ack = await publish(link, "S", messages)
            assert not any(result.code for result in ack.results)

        async def operation() -> None:
            seqs = list(itertools.islice(sequences, EXPECTING))
            await expect(["s.*.x"] * EXPECTING, [seq - 1 for seq in seqs])
            await expect([f"s.*.{at}" for at in range(EXPECTING)], [0] * EXPECTING)
            next(itertools.islice(sequences, EXPECTING - 1, None))

        await operation()
        await publish_all(link, "S", [f"s.{at}.x" for at in range(SUBJECTS)])
        next(itertools.islice(sequences, SUBJECTS - 1, None))
        await assert_no_stall(operation)

    play(tmp_path, scene)
