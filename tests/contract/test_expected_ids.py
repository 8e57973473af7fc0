"""A publisher that expected another last message id is told the one that there is."""

from typing import Any

import pytest

from tests.contract.conftest import Stream, assert_problem
from tests.contract.talk import Talk
from tests.support.servers import ServerProcess


@pytest.fixture(params=[{}, {"storage": "memory"}, {"shards": 3}, {"erasure": "subject_key"}])
def kept(unused: Stream, request: pytest.FixtureRequest) -> Any:
    """A stream of each kind that publishes go another way for."""
    assert unused.configure(**request.param).status_code == 201
    yield unused
    unused.client.delete(unused.path)


def refused(stream: Stream, wanted: str = "mine") -> str:
    answer = stream.publish(nats_expected_last_msg_id=wanted)
    assert_problem(answer, 412, 10070)
    detail: str = answer.json()["detail"]
    return detail


def test_actual_id_is_reported_while_there_is_one(kept: Stream) -> None:
    none = "wrong last msg ID: the last message has no id"
    assert refused(kept) == none
    assert kept.publish(nats_msg_id="first").status_code == 201
    assert refused(kept) == "wrong last msg ID: first"
    second = kept.publish(idempotency_key="second", nats_expected_last_msg_id="first")
    assert second.status_code == 201, second.text
    assert refused(kept) == "wrong last msg ID: second"
    last = second.json()
    shard = {"shard": last["shard"]} if "shard" in last else {}
    target = f"{kept.path}/messages/{last['seq']}"
    assert kept.client.delete(target, params=shard).status_code == 204
    # It is still the last: its id is expected as before, but what it was is gone with it.
    assert refused(kept) == "wrong last msg ID"
    assert kept.publish(nats_expected_last_msg_id="second").status_code == 201
    assert refused(kept) == none


def test_each_message_of_a_batch_gets_its_own_result(kept: Stream) -> None:
    def item(**fields: Any) -> dict[str, Any]:
        return {"subject": kept.subject(), "data": "x", **fields}

    wrong = {"expected": {"last_msg_id": "mine"}}
    messages = [
        item(msg_id="a"), item(**wrong), item(msg_id="b"), item(**wrong), item(), item(**wrong),
    ]  # fmt: skip
    answer = kept.client.post(f"{kept.path}/messages", json={"messages": messages})
    assert answer.status_code == 207
    details = [one["problem"]["detail"] for one in answer.json()["results"] if "problem" in one]
    assert details == [
        "wrong last msg ID: a",
        "wrong last msg ID: b",
        "wrong last msg ID: the last message has no id",
    ]
    assert kept.publish(nats_msg_id="c").status_code == 201
    assert refused(kept) == "wrong last msg ID: c"


def test_socket_is_notified_too(server: ServerProcess, stream: Stream) -> None:
    stream.publish(nats_msg_id="first")
    with Talk(server.url) as talk:
        expected = {"last_msg_id": "mine"}
        answer = talk.refused("pub", subject=stream.subject(), data="x", expected=expected)
        assert answer["detail"] == "wrong last msg ID: first"
