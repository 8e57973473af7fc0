"""Erasing messages, and asking for receipts, over every form of the server."""

import asyncio

import pytest

from contrail_client import AsyncContrail, Contrail, Invalid, NotFound
from tests.contract.conftest import Stream, assert_problem
from tests.support.command import run_contrail


def erase(stream: Stream, body: object, query: str = "?wait=60s") -> dict[str, object]:
    answer = stream.client.post(f"{stream.path}/erase{query}", json=body)
    assert answer.status_code == 200, answer.text
    receipt: dict[str, object] = answer.json()
    return receipt


def test_erased_messages_are_gone_and_the_receipt_stays(stream: Stream) -> None:
    stream.fill(10)
    receipt = erase(stream, {"seqs": [3, 5, 5]})
    assert (receipt["status"], receipt["messages"]) == ("done", 2)
    replicas = receipt["replicas"]
    assert isinstance(replicas, list)
    leader = stream.client.get(stream.path).json()["cluster"]["leader"]
    assert replicas == [{"node": leader, "status": "done"}]
    for seq in (3, 5):
        assert_problem(stream.client.get(f"{stream.path}/messages/{seq}"), 404, 10037)
    assert stream.client.get(f"{stream.path}/messages/4").status_code == 200
    stream.client.delete(stream.path)
    found = stream.client.get(f"/v1/erasures/{receipt['id']}")
    assert (found.status_code, found.json()) == (200, receipt)


def test_receipt_that_is_not_waited_for_says_where_to_ask(stream: Stream) -> None:
    stream.fill(5)
    answer = stream.client.post(f"{stream.path}/erase", json={"seqs": [1]})
    assert answer.status_code == 202, answer.text
    pending = answer.json()
    assert (pending["status"], pending["messages"]) == ("pending", 1)
    assert answer.headers["location"] == f"/v1/erasures/{pending['id']}"
    done = stream.client.get(answer.headers["location"], params={"wait": "60s"})
    assert (done.status_code, done.json()["status"]) == (200, "done")


def test_subjects_are_erased_by_filter_and_messages_gone_before_too(stream: Stream) -> None:
    stream.fill(6)
    state = stream.state()
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 3})
    assert erase(stream, {"seqs": [1, 2]})["messages"] == 2
    assert erase(stream, {"subject": ">"})["messages"] == 4
    assert stream.state()["messages"] == 0
    assert stream.state()["last_seq"] == state["last_seq"]
    assert erase(stream, {"subject": ">"})["messages"] == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, 20030),
        ({"seqs": []}, 422, 20030),
        ({"seqs": [0]}, 422, 20030),
        ({"seqs": ["1"]}, 422, 20030),
        ({"seqs": [1 << 63]}, 422, 20030),
        ({"seqs": list(range(1, 10_002))}, 422, 20030),
        ({"seqs": [1], "subject": "a"}, 422, 10003),
        ({"subject": "a..b"}, 422, 20003),
        ({"seqs": [1], "more": 1}, 422, 20030),
        ({"seqs": [1, 99]}, 404, 10043),
        ([1], 422, 20030),
    ],
)
def test_bad_request_is_refused_and_nothing_is_erased(
    stream: Stream, body: object, status: int, code: int
) -> None:
    stream.fill(3)
    assert_problem(stream.client.post(f"{stream.path}/erase", json=body), status, code)
    assert stream.state()["messages"] == 3


def test_as_many_sequences_as_there_may_be_are_erased(stream: Stream) -> None:
    stream.fill(3)
    seqs = [1, 2, 3] * 3_333 + [1]
    assert erase(stream, {"seqs": seqs})["messages"] == 3
    assert stream.state()["messages"] == 0


def test_protected_streams_refuse(stream: Stream) -> None:
    stream.fill(3)
    stream.client.patch(
        stream.path,
        json={"deny_delete": True},
        headers={"content-type": "application/merge-patch+json"},
    )
    for body in ({"seqs": [1]}, {"subject": ">"}):
        answer = stream.client.post(f"{stream.path}/erase", json=body)
        assert_problem(answer, 409, 10057)
    stream.client.post(f"{stream.path}/seal")
    assert_problem(stream.client.post(f"{stream.path}/erase", json={"seqs": [1]}), 409, 10109)
    assert stream.state()["messages"] == 3


def test_what_is_not_there_is_not_found(stream: Stream) -> None:
    assert_problem(stream.client.get("/v1/erasures/none"), 404, 20070)
    answer = stream.client.post("/v1/streams/none/erase", json={"seqs": [1]})
    assert_problem(answer, 404, 10059)
    answer = stream.client.get("/v1/erasures/none", params={"wait": "61s"})
    assert answer.status_code == 422


def test_sdk_erases_and_waits(stream: Stream) -> None:
    stream.fill(4)
    url = str(stream.client.base_url)
    with Contrail(url) as contrail:
        receipt = contrail.erase(stream.name, [1, 2], wait_s=60.0)
        assert (receipt.status, receipt.messages) == ("done", 2)
        assert contrail.erasure(receipt.id) == receipt
        with pytest.raises(NotFound):
            contrail.erasure("none")
        with pytest.raises(Invalid):
            contrail.erase(stream.name)

    async def also() -> None:
        async with AsyncContrail(url) as other:
            second = await other.erase(stream.name, subject=">")
            assert (await other.erasure(second.id, wait_s=60.0)).status == "done"

    asyncio.run(also())


def test_command_erases_and_shows_the_receipt(stream: Stream) -> None:
    stream.fill(4)
    env = {"CONTRAIL_URL": str(stream.client.base_url)}
    erased = run_contrail("stream", "erase", stream.name, "1", "3", "--yes", "--json", env=env)
    assert erased.exit_code == 0, erased.output
    assert '"status":"done"' in erased.stdout.replace(" ", "")
    missing = run_contrail("erasure", "none", env=env)
    assert missing.exit_code == 3
