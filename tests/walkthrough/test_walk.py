"""The hops of the tour are those of a real run, in the order of the architecture page."""

import asyncio
from pathlib import Path

from tests.walkthrough.tracing import Hop
from tests.walkthrough.walk import walk

PUBLISH_CALLS_MAX = 315
PUBLISH_FILES_MAX = 64
"""The most calls and files from the socket to the answer. Lower these when it gets less."""


def _position(hops: list[Hop], name: str) -> int:
    return next(at for at, hop in enumerate(hops) if hop.name.endswith(name))


def test_one_publish_and_one_delivery_pass_every_hop_of_the_tour(tmp_path: Path) -> None:
    walked = asyncio.run(walk(tmp_path / "data"))
    published, delivered = walked.published, walked.delivered

    assert walked.missing == []
    order = [
        "SinglePublish.publish_directly", "Proposer.append_then", "RaftGroup.propose",
        "NodeLog._write", "Applier.apply", "Appender.append", "EntryContext.resolve",
        "DirectExchange.send", "Shard.advance",
    ]  # fmt: skip
    positions = [_position(published, name) for name in order]
    assert positions == sorted(positions)
    assert _position(delivered, "Pulls.next") < _position(delivered, "Acks.ack")
    assert published[_position(published, "NodeLog._write")].thread == "contrail-wal"


def test_one_publish_passes_no_more_of_the_code_than_it_did(tmp_path: Path) -> None:
    passed = asyncio.run(walk(tmp_path / "data")).publish_calls

    assert passed.calls <= PUBLISH_CALLS_MAX
    assert len(passed.files) <= PUBLISH_FILES_MAX, sorted(passed.files)
