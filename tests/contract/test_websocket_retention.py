"""Subscriptions to streams that keep messages for consumers, and to the last of each subject."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.conftest import Stream
from tests.contract.talk import Talk, seqs
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

WHOLE = {"msgs": 10, "bytes": 1 << 20}


@pytest.fixture
def talk(server: ServerProcess) -> Iterator[Talk]:
    with Talk(server.url) as opened:
        yield opened


@pytest.fixture
def workqueue(unused: Stream) -> Stream:
    assert unused.configure(retention="workqueue").status_code == 201
    return unused


@pytest.fixture
def interest(unused: Stream) -> Stream:
    assert unused.configure(retention="interest").status_code == 201
    return unused


def test_acks_over_a_socket_remove_from_a_workqueue(talk: Talk, workqueue: Stream) -> None:
    workqueue.fill(3)
    workqueue.consumer()
    talk.done("sub", sid="s", stream=workqueue.name, consumer="c", credit=WHOLE)
    assert seqs(talk.messages(3)) == [1, 2, 3]
    talk.done("ack", sid="s", seqs=[1, 3])
    assert workqueue.state()["messages"] == 1
    talk.done("term", sid="s", seqs=[2])
    assert workqueue.state()["messages"] == 0


@each(
    ("fields", "name"),
    [
        ({"ordered": True}, "workqueue_needs_explicit_ack"),
        ({"deliver_policy": "new"}, "workqueue_needs_deliver_all"),
        ({}, "workqueue_unfiltered"),
    ],
)
def test_subscription_that_a_workqueue_cannot_have_is_refused(
    talk: Talk, workqueue: Stream, fields: dict[str, Any], name: str
) -> None:
    workqueue.consumer()
    assert talk.refused("sub", sid="s", stream=workqueue.name, **fields)["name"] == name


def test_ordered_subscription_empties_an_interest_stream(talk: Talk, interest: Stream) -> None:
    talk.done("sub", sid="s", stream=interest.name, ordered=True, credit=WHOLE)
    interest.fill(4)
    assert seqs(talk.messages(4)) == [1, 2, 3, 4]
    assert interest.state()["messages"] == 0


def test_subscription_begins_with_the_last_message_of_each_subject(
    talk: Talk, stream: Stream
) -> None:
    stream.fill(12)
    wanted = [stream.subject("*")]
    fields = {"deliver_policy": "last_per_subject", "filter_subjects": wanted}
    talk.done("sub", sid="s", stream=stream.name, credit=WHOLE, **fields)
    assert seqs(talk.messages(5)) == [8, 9, 10, 11, 12]
    stream.publish()
    assert seqs(talk.messages(1)) == [13]
