"""The tour passes through the layers in order, and does not grow."""

import asyncio

import pytest

from tests.walkthrough.tracing import Hop
from tests.walkthrough.walk import Walk, walk

PUBLISH_CALLS_MAX = 160
PUBLISH_FILES_MAX = 54
"""The most calls and files from the socket to the answer. Lower these when it gets less."""


def _positions(hops: list[Hop], modules: list[str]) -> list[int]:
    names = [hop.file.stem for hop in hops]
    return [names.index(module) for module in modules]


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    return asyncio.run(walk(tmp_path_factory.mktemp("walk") / "data"))


def test_one_publish_and_one_delivery_pass_through_the_layers_in_order(walked: Walk) -> None:
    published = ["http_protocol", "single", "link", "proposer", "journal", "append"]
    delivered = ["http_protocol", "pull", "link", "reader", "proposer", "applier"]
    acked = ["reader", "acks"]  # the delivery may be proposed before its ack arrives
    for hops, modules in (
        (walked.published, published),
        (walked.delivered, delivered),
        (walked.delivered, acked),
    ):
        positions = _positions(hops, modules)
        assert positions == sorted(positions), modules
    assert {hop.file for hop in walked.published} == walked.publish_calls.files
    assert "contrail-wal" in {hop.thread for hop in walked.published}


def test_one_publish_passes_no_more_of_the_code_than_it_did(walked: Walk) -> None:
    passed = walked.publish_calls
    assert passed.calls <= PUBLISH_CALLS_MAX
    assert len(passed.files) <= PUBLISH_FILES_MAX, sorted(passed.files)
