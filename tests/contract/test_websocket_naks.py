"""Messages that a socket gave back by nak, and that came to it again."""

from collections.abc import Iterator

import pytest

from tests.contract.conftest import Stream
from tests.contract.talk import Frame, Talk, seqs
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

WHOLE = {"msgs": 1_000, "bytes": 1 << 20}


@pytest.fixture
def talk(server: ServerProcess) -> Iterator[Talk]:
    with Talk(server.url) as opened:
        yield opened


@pytest.mark.parametrize("fields", [{}, {"ack_policy": "all"}])
def test_naked_message_that_came_again_can_be_acknowledged(
    talk: Talk, stream: Stream, fields: dict[str, str]
) -> None:
    stream.fill(3)
    stream.consumer(**fields)
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(3)
    talk.send({"op": "nak", "id": "nak", "sid": "s", "seqs": [1, 2, 3]})
    # They may come before the answer, because a waiting pull gets them at once.
    assert seqs(messages_around(talk, "nak", 3)) == [1, 2, 3]
    talk.done("ack", sid="s", seqs=[1, 2, 3])
    found = stream.client.get(f"{stream.path}/consumers/c").json()
    assert found["ack_floor"]["stream_seq"] == 3


def test_naked_message_that_waits_for_credit_comes_with_it(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    stream.consumer(ack_wait="1h")
    each_bytes = len(stream.subject("1")) + 1
    # A pull counts only payloads, so one for these three bytes brings all messages again.
    credit = {"msgs": 9, "bytes": 3 * each_bytes + 3}
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=credit)
    talk.messages(3)
    talk.send({"op": "nak", "id": "nak", "sid": "s", "seqs": [1, 2, 3]})
    assert seqs(messages_around(talk, "nak", 1)) == [1]
    talk.done("credit", sid="s", bytes=3 * each_bytes)
    assert seqs(talk.messages(2)) == [2, 3]
    talk.done("ack", sid="s", seqs=[1, 2, 3])


def messages_around(talk: Talk, answer: str, count: int) -> list[Frame]:
    """The next ``count`` messages, which come before or after the ``ok`` of ``answer``."""
    found: list[Frame] = []
    answered = False
    while len(found) < count or not answered:
        frame = talk.next()
        if frame["op"] == "msgs":
            found += frame["messages"]
        else:
            assert (frame["op"], frame["id"]) == ("ok", answer)
            answered = True
    return found
