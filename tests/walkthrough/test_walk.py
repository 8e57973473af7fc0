"""The tour passes through the layers in order, and does not grow."""

import asyncio
from pathlib import Path

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_storage.link import LocalLink
from tests.unit.storage.cluster_rig import running
from tests.walkthrough.tracing import Hop, Recorder
from tests.walkthrough.walk import Walk, walk

PUBLISH_CALLS_MAX = 160
PUBLISH_FILES_MAX = 54
"""The most calls and files from the socket to the answer. Lower these when it gets less."""
REPLICATED_CALLS_MAX = 250
"""The most calls on three nodes, from the link of the leader to the answer, without sockets."""
PUBLISHES_MAX = 2_000


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


def test_one_publish_on_three_nodes_takes_no_more_calls_than_it_did(tmp_path: Path) -> None:
    recorder = Recorder()

    async def calls() -> list[int]:
        async with running(tmp_path) as nodes:
            config = StreamConfig(name="TOUR", subjects=("tour.>",), num_replicas=3)
            await nodes.call("a", lambda link: link.put_stream(config, "put", None, False))
            await nodes.until_listed("TOUR")
            group = nodes["a"].meta.group_of(nodes["a"].meta.streams["TOUR"].shard_id)
            counts: list[int] = []
            # In the shortest one, no timer runs. On a busy machine it takes a while until it comes.
            while len(counts) < PUBLISHES_MAX and min(counts, default=1_000) > REPLICATED_CALLS_MAX:
                link = LocalLink(nodes[nodes.leader(group)])
                recorder.watch()
                try:
                    await publish(link, "TOUR", [PublishMessage("tour.hello", None, b"hello")])
                except ApiError as error:
                    if error.spec is errors.NOT_LEADER:
                        continue  # leadership was given back to another node
                    raise
                counts.append(recorder.census().calls)
            return counts

    recorder.install()
    try:
        counts = asyncio.run(calls())
    finally:
        recorder.uninstall()
    assert min(counts) <= REPLICATED_CALLS_MAX
