"""Subscriptions: credit to the message, acknowledgements by sequence, order, shared consumers."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.conftest import Stream
from tests.contract.talk import JSON, MSGPACK, Talk, seqs, wait_until
from tests.support.each import each
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

WHOLE = {"msgs": 1_000, "bytes": 1 << 20}


@pytest.fixture
def talk(server: ServerProcess) -> Iterator[Talk]:
    with Talk(server.url) as opened:
        yield opened


def info(stream: Stream, consumer: str = "c") -> dict[str, Any]:
    found: dict[str, Any] = stream.client.get(f"{stream.path}/consumers/{consumer}").json()
    return found


# The consumer ------------------------------------------------------------------------------------
@pytest.mark.parametrize("ordered", [False, True])
def test_own_consumer_has_what_jetstream_clients_ask_of_theirs(
    talk: Talk, stream: Stream, ordered: bool
) -> None:
    asked = {"num_replicas": 1, "mem_storage": True}
    answer = talk.done("sub", sid="s", stream=stream.name, ordered=ordered, credit=WHOLE, **asked)
    config = info(stream, answer["consumer"])["config"]
    assert {key: config[key] for key in asked} == asked
    refused = talk.refused("sub", sid="t", stream=stream.name, num_replicas=2)
    assert refused["name"] == "consumer_replicas_exceeded"


def test_consumer_is_bound_exactly_while_a_subscription_holds_it(
    server: ServerProcess, talk: Talk, stream: Stream
) -> None:
    def bound(name: str = "c") -> bool:
        found: bool = info(stream, name)["push_bound"]
        return found

    stream.consumer()
    stream.next(f"{stream.path}/consumers/c", no_wait=True)
    assert not bound()  # a pull is no subscription
    talk.done("sub", sid="s", stream=stream.name, consumer="c")
    assert bound()  # with the answer, whichever process is asked, and without any credit
    with Talk(server.url) as other:
        other.done("sub", sid="t", stream=stream.name, consumer="c", credit=WHOLE)
        talk.done("unsub", sid="s")
        assert bound()
        listed = stream.client.get(f"{stream.path}/consumers").json()["items"]
        assert [one["push_bound"] for one in listed] == [True]
    wait_until(lambda: not bound())  # the socket is closed, and nobody has said so
    own = talk.done("sub", sid="u", stream=stream.name, ordered=True, credit=WHOLE)["consumer"]
    assert bound(own)
    assert not bound()
    talk.done("sub", sid="v", stream=stream.name, consumer="c", credit=WHOLE)
    stream.client.delete(f"{stream.path}/consumers/c")
    assert talk.next("gone")["sid"] == "v"
    stream.consumer()
    assert not bound()  # it is another of the same name
    talk.done("sub", sid="w", stream=stream.name, consumer="c", credit=WHOLE)
    talk.done("unsub", sid="w", drain=True)
    wait_until(lambda: not bound())


def test_consumer_of_several_shards_is_bound_too(talk: Talk, unused: Stream) -> None:
    assert unused.configure(shards=3).status_code == 201
    unused.consumer()
    talk.done("sub", sid="s", stream=unused.name, consumer="c")
    assert info(unused)["push_bound"]
    talk.done("unsub", sid="s")
    wait_until(lambda: not info(unused)["push_bound"])


# Messages ----------------------------------------------------------------------------------------
def test_durable_consumer_is_pushed_what_it_would_be_pulled(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    stream.consumer()
    answer = talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    assert (answer["sid"], answer["consumer"], answer["num_pending"]) == ("s", "c", 3)
    first, second, _ = talk.messages(3)
    assert first["ack_token"]
    assert {key: first[key] for key in first if key not in ("time", "ack_token")} == {
        "stream": stream.name,
        "seq": 1,
        "subject": stream.subject("1"),
        "headers": {},
        "consumer_seq": 1,
        "num_delivered": 1,
        "num_pending": 2,
        "data": "1",
    }
    assert second["num_pending"] == 1
    stream.publish(b"\xff")
    [later] = talk.messages(1)
    assert later["data_base64"] == "/w=="


def test_msgpack_brings_payloads_as_bytes(server: ServerProcess, stream: Stream) -> None:
    stream.publish(b"\xff\x00")
    with Talk(server.url, MSGPACK) as talk:
        talk.done("sub", sid="s", stream=stream.name, credit=WHOLE)
        [message] = talk.messages(1)
        assert message["data"] == b"\xff\x00"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"deliver_policy": "last"}, [7]),
        ({"deliver_policy": "by_start_sequence", "opt_start_seq": 6}, [6, 7]),
        (
            {"deliver_policy": "by_start_time", "opt_start_time": "2020-01-01T00:00:00Z"},
            [1, 2, 3, 4, 5, 6, 7],
        ),
        ({"filter_subjects": ["{prefix}.1", "{prefix}.2"]}, [1, 2, 6, 7]),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_subscription_without_a_consumer_begins_where_its_options_say(
    talk: Talk, stream: Stream, wanted: dict[str, Any], expected: list[int], ordered: bool
) -> None:
    stream.fill(7)
    if "filter_subjects" in wanted:
        filters = [one.format(prefix=stream.prefix) for one in wanted["filter_subjects"]]
        wanted = {"filter_subjects": filters}
    talk.done("sub", sid="s", stream=stream.name, credit=WHOLE, ordered=ordered, **wanted)
    found = talk.messages(len(expected))
    assert seqs(found) == expected
    assert all(("ack_token" in message) is not ordered for message in found)
    talk.nothing_more()


def test_subscription_to_what_is_new_gets_only_that(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    talk.done("sub", sid="s", stream=stream.name, deliver_policy="new", credit=WHOLE)
    stream.publish()
    assert seqs(talk.messages(1)) == [4]


@each(
    ("fields", "name"),
    [
        ({"stream": "NOT_THERE"}, "stream_not_found"),
        ({"consumer": "nobody"}, "consumer_not_found"),
        ({"consumer": "c", "deliver_policy": "all"}, "invalid_field"),
        ({"consumer": "c", "ordered": True}, "invalid_field"),
        ({"consumer": "c", "mem_storage": False}, "invalid_field"),
        ({"replay_policy": "original"}, "consumer_config_invalid"),
        ({"deliver_policy": "last_per_subject"}, "deliver_policy_invalid"),
        ({"deliver_policy": "by_start_sequence"}, "deliver_policy_invalid"),
        ({"opt_start_time": "yesterday"}, "invalid_field"),
        ({"filter_subjects": ["a.>", "a.b"]}, "filters_overlap"),
        ({"cols": True}, "invalid_field"),
    ],
)
def test_subscription_that_cannot_stand_is_refused_and_leaves_its_sid_free(
    talk: Talk, stream: Stream, fields: dict[str, Any], name: str
) -> None:
    stream.consumer()
    assert talk.refused("sub", **{"sid": "s", "stream": stream.name, **fields})["name"] == name
    talk.done("sub", sid="s", stream=stream.name)
    talk.done("unsub", sid="s")


def test_sid_that_is_taken_is_refused(talk: Talk, stream: Stream) -> None:
    talk.done("sub", sid="s", stream=stream.name)
    assert talk.refused("sub", sid="s", stream=stream.name)["name"] == "subscription_exists"


def test_several_subscriptions_of_a_socket_are_apart(talk: Talk, stream: Stream) -> None:
    stream.fill(4)
    talk.done("sub", sid="a", stream=stream.name)
    talk.done("sub", sid="b", stream=stream.name, filter_subjects=[stream.subject("2")])
    talk.send({"op": "credit", "sid": "b", "msgs": 9})
    frame = talk.next("msgs")
    assert (frame["sid"], seqs(frame["messages"])) == ("b", [2])
    talk.send({"op": "credit", "sid": "a", "msgs": 9})
    frame = talk.next("msgs")
    assert (frame["sid"], seqs(frame["messages"])) == ("a", [1, 2, 3, 4])


def test_consumer_of_a_subscription_is_removed_with_it(
    server: ServerProcess, stream: Stream
) -> None:
    def consumers() -> int:
        count: int = stream.state()["consumer_count"]
        return count

    with Talk(server.url) as talk:
        talk.done("sub", sid="a", stream=stream.name)
        talk.done("sub", sid="b", stream=stream.name, ordered=True)
        assert consumers() == 2
        talk.done("unsub", sid="a")
        wait_until(lambda: consumers() == 1)
    wait_until(lambda: consumers() == 0)


# Credit ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", [JSON, MSGPACK])
def test_no_message_is_sent_beyond_the_credit(
    server: ServerProcess, stream: Stream, form: str
) -> None:
    stream.fill(50)
    with Talk(server.url, form) as talk:
        talk.done("sub", sid="s", stream=stream.name)
        talk.nothing_more()
        for more in (1, 7, 30):
            talk.done("credit", sid="s", msgs=more)
            talk.messages(more)
            talk.nothing_more()
        talk.done("credit", sid="s", msgs=100)
        assert seqs(talk.messages(12)) == list(range(39, 51))


@pytest.mark.parametrize("credit", [1, 9, 10, 11, 99, 100, 101, 1_000, 5_555])
def test_message_that_begins_within_the_credit_of_bytes_is_sent_whole(
    talk: Talk, stream: Stream, credit: int
) -> None:
    sizes = [1, 200, 0, 3, 700, 40, 9, 1, 1] * 20
    messages = [{"subject": stream.subject("abcdefgh"), "data": "x" * size} for size in sizes]
    stream.client.post(f"{stream.path}/messages", json={"messages": messages})
    subject_bytes = len(stream.subject("abcdefgh"))
    expected, spent = 0, 0
    while spent < credit and expected < len(sizes):
        spent += sizes[expected] + subject_bytes
        expected += 1
    talk.done("sub", sid="s", stream=stream.name, credit={"bytes": credit})
    assert seqs(talk.messages(expected)) == list(range(1, expected + 1))
    talk.nothing_more()
    if spent > credit:
        talk.done("credit", sid="s", bytes=spent - credit)
        talk.nothing_more()
    talk.done("credit", sid="s", bytes=1)
    assert seqs(talk.messages(1)) == [expected + 1]


def test_message_larger_than_a_batch_is_sent_by_itself(talk: Talk, stream: Stream) -> None:
    stream.publish(b"a")
    stream.publish(b"b" * 900_000)
    stream.publish(b"c")
    talk.done("sub", sid="s", stream=stream.name, credit={"msgs": 3, "bytes": 10})
    assert seqs(talk.messages(2)) == [1, 2]
    talk.nothing_more()
    talk.done("credit", sid="s", bytes=900_100)
    assert seqs(talk.messages(1)) == [3]


# Acknowledgements --------------------------------------------------------------------------------
def test_synchronous_ack_is_durable_when_it_is_answered(own_server: ServerProcess) -> None:
    with own_server.client() as client:
        stream = Stream(client, "T", "t")
        stream.configure()
        stream.fill(10)
        stream.consumer()
        with Talk(own_server.url) as talk:
            talk.done("sub", sid="s", stream="T", consumer="c", credit=WHOLE)
            talk.messages(10)
            talk.done("ack", sid="s", seqs=[1, 2], ranges=[[4, 6], [5, 7]])
            own_server.kill()
    own_server.start()
    with own_server.client() as client:
        found = info(Stream(client, "T", "t"))
        assert found["ack_floor"]["stream_seq"] == 2
        assert found["num_ack_pending"] == 4


def test_acks_without_an_id_are_applied_in_silence(talk: Talk, stream: Stream) -> None:
    stream.fill(5)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    for seq in seqs(talk.messages(5)):
        talk.send({"op": "ack", "sid": "s", "seqs": [seq]})
    talk.nothing_more()
    wait_until(lambda: info(stream)["ack_floor"]["stream_seq"] == 5)


def test_only_what_the_socket_was_sent_can_be_acknowledged(talk: Talk, stream: Stream) -> None:
    stream.fill(10)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit={"msgs": 5})
    talk.messages(5)
    for named in ({"seqs": [6]}, {"ranges": [[6, 9]]}, {"ranges": [[9, 1]]}):
        assert talk.refused("ack", sid="s", **named)["name"] == "not_sent_here"
    talk.send({"op": "ack", "sid": "s", "seqs": [7]})
    assert talk.next("error")["sid"] == "s"
    talk.done("ack", sid="s", ranges=[[0, 1 << 62]])
    assert talk.refused("ack", sid="s", seqs=[1])["name"] == "not_sent_here"
    assert talk.refused("ack", sid="s")["name"] == "invalid_field"
    assert info(stream)["ack_floor"]["stream_seq"] == 5


@pytest.mark.parametrize("with_id", [True, False])
def test_ack_that_names_unknown_messages_too_is_applied_to_the_others(
    talk: Talk, stream: Stream, with_id: bool
) -> None:
    stream.fill(6)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit={"msgs": 4})
    talk.messages(4)
    frame = {"op": "ack", "sid": "s", "seqs": [2, 99, 1], "ranges": [[3, 5], [70, 80]]}
    talk.send(frame | {"id": "a"} if with_id else frame)
    refused = talk.next("error")
    assert refused.get("id") == ("a" if with_id else None)
    assert refused["problem"]["name"] == "not_sent_here"
    assert (
        refused["problem"]["detail"] == "not awaiting acknowledgement on this socket: 99, 70 to 80"
    )
    talk.nothing_more()
    assert info(stream)["ack_floor"]["stream_seq"] == 4


def test_messages_that_waited_for_credit_of_a_broken_socket_go_to_another_at_once(
    server: ServerProcess, stream: Stream
) -> None:
    stream.fill(5)
    path = stream.consumer(ack_wait="1h")
    with Talk(server.url) as broken:
        credit = {"msgs": 9, "bytes": len(stream.subject("1")) + 2}
        broken.done("sub", sid="s", stream=stream.name, consumer="c", credit=credit)
        [first, *_] = broken.messages(2)
        assert first["seq"] == 1
        broken.socket.socket.close()
    found = stream.next(path, batch=3, expires="20s")
    while len(found) < 3:
        found += stream.next(path, batch=3, expires="20s")
    assert sorted(seqs(found)) == [3, 4, 5]


def test_naked_message_comes_again_and_a_terminated_one_never(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(3)
    talk.send(
        {"op": "nak", "sid": "s", "seqs": [1]},
        {"op": "term", "sid": "s", "seqs": [2], "reason": "bad"},
        {"op": "in_progress", "sid": "s", "seqs": [3]},
    )
    [again] = talk.messages(1)
    assert (again["seq"], again["num_delivered"]) == (1, 2)
    talk.done("nak", sid="s", seqs=[1], delay="1h")
    talk.done("ack", sid="s", seqs=[3])
    assert info(stream)["num_ack_pending"] == 1


def test_token_of_a_pull_can_be_acknowledged_over_the_socket_and_back(
    talk: Talk, stream: Stream
) -> None:
    stream.fill(2)
    path = stream.consumer()
    [pulled] = stream.next(path)
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    [pushed] = talk.messages(1)
    talk.done("ack", sid="s", tokens=[pulled["ack_token"]])
    assert stream.ack(path, pushed["ack_token"]) == [{"ok": True}]
    assert info(stream)["ack_floor"]["stream_seq"] == 2
    assert talk.refused("ack", sid="s", tokens=["forged"])["name"] == "ack_token_invalid"


def test_messages_of_a_socket_that_died_come_to_another(
    server: ServerProcess, stream: Stream
) -> None:
    stream.fill(4)
    stream.consumer(ack_wait="500ms")
    with Talk(server.url) as dying:
        dying.done("sub", sid="s", stream=stream.name, consumer="c", credit={"msgs": 4})
        dying.messages(4)
        dying.done("ack", sid="s", seqs=[2])
    with Talk(server.url) as other:
        other.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
        found = other.messages(3)
        assert seqs(found) == [1, 3, 4]
        assert {message["num_delivered"] for message in found} == {2}


def test_sockets_of_one_consumer_share_its_messages(server: ServerProcess, stream: Stream) -> None:
    path = stream.consumer(max_ack_pending=-1)
    with Talk(server.url) as one, Talk(server.url, MSGPACK) as two, Talk(server.url) as three:
        talks = [one, two, three]
        for talk in talks:
            talk.done("sub", sid="s", stream=stream.name, consumer="c", credit={"msgs": 20})
        stream.fill(60)
        found = [talk.messages(20) for talk in talks]
        assert sorted(seq for messages in found for seq in seqs(messages)) == list(range(1, 61))
        for talk, messages in zip(talks, found, strict=True):
            talk.done("ack", sid="s", seqs=seqs(messages))
    assert stream.client.get(path).json()["ack_floor"]["stream_seq"] == 60


def test_ack_policy_all_takes_everything_below(talk: Talk, stream: Stream) -> None:
    stream.fill(5)
    stream.consumer(ack_policy="all")
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(5)
    talk.done("ack", sid="s", seqs=[4])
    assert info(stream)["ack_floor"]["stream_seq"] == 4
    assert talk.refused("ack", sid="s", seqs=[3])["name"] == "not_sent_here"


@pytest.mark.parametrize(("kind", "fields"), [("nak", {"delay": "1h"}), ("term", {})])
def test_ack_policy_all_leaves_what_is_below_a_nak_or_term_to_be_acknowledged(
    talk: Talk, stream: Stream, kind: str, fields: dict[str, str]
) -> None:
    stream.fill(5)
    stream.consumer(ack_policy="all")
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(5)
    talk.done(kind, sid="s", seqs=[5], **fields)
    assert info(stream)["ack_floor"]["stream_seq"] == 0
    talk.done("ack", sid="s", seqs=[3])
    assert info(stream)["ack_floor"]["stream_seq"] == 3
    talk.done("ack", sid="s", seqs=[4])


def test_reset_consumer_continues_with_what_it_delivers_again(talk: Talk, stream: Stream) -> None:
    stream.fill(2)
    path = stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(2)
    assert stream.client.delete(path).status_code == 204
    assert talk.next("gone") == {"op": "gone", "sid": "s", "reason": "the consumer was deleted"}
    assert talk.refused("ack", sid="s", seqs=[1])["name"] == "subscription_not_found"
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    assert seqs(talk.messages(2)) == [1, 2]


# Order -------------------------------------------------------------------------------------------
def test_ordered_subscription_reports_what_was_purged_and_continues(
    talk: Talk, stream: Stream
) -> None:
    stream.fill(10)
    talk.done("sub", sid="s", stream=stream.name, ordered=True, credit={"msgs": 3})
    assert seqs(talk.messages(3)) == [1, 2, 3]
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 8})
    talk.done("credit", sid="s", msgs=100)
    gap = talk.next("gap")
    assert (gap["sid"], gap["first"], gap["last"]) == ("s", 4, 7)
    assert gap["cause"]
    assert seqs(talk.messages(3)) == [8, 9, 10]
    stream.publish()
    assert seqs(talk.messages(1)) == [11]


def test_resumed_subscription_reports_what_it_missed(talk: Talk, stream: Stream) -> None:
    stream.fill(10)
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 6})
    talk.done(
        "sub",
        sid="s",
        stream=stream.name,
        deliver_policy="by_start_sequence",
        opt_start_seq=3,
        ordered=True,
        credit=WHOLE,
    )
    gap = talk.next("gap")
    assert (gap["first"], gap["last"]) == (3, 5)
    assert seqs(talk.messages(5)) == [6, 7, 8, 9, 10]


def test_ordered_subscription_survives_the_loss_of_its_consumer(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    name = talk.done("sub", sid="s", stream=stream.name, ordered=True, credit=WHOLE)["consumer"]
    assert seqs(talk.messages(3)) == [1, 2, 3]
    assert stream.client.delete(f"{stream.path}/consumers/{name}").status_code == 204
    stream.publish()
    assert seqs(talk.messages(1)) == [4]


def test_message_taken_by_someone_else_comes_in_order_all_the_same(
    talk: Talk, stream: Stream
) -> None:
    stream.fill(6)
    name = talk.done("sub", sid="s", stream=stream.name, ordered=True, credit={"msgs": 2})[
        "consumer"
    ]
    assert seqs(talk.messages(2)) == [1, 2]
    assert len(stream.next(f"{stream.path}/consumers/{name}", batch=2)) == 2
    talk.done("credit", sid="s", msgs=10)
    assert seqs(talk.messages(4)) == [3, 4, 5, 6]


def test_gone_stream_ends_its_subscriptions(talk: Talk, stream: Stream) -> None:
    stream.consumer()
    talk.done("sub", sid="a", stream=stream.name, consumer="c", credit=WHOLE)
    talk.done("sub", sid="b", stream=stream.name, ordered=True, credit=WHOLE)
    stream.client.delete(stream.path)
    gone = [talk.next("gone"), talk.next("gone")]
    assert {frame["sid"] for frame in gone} == {"a", "b"}
    assert {frame["reason"] for frame in gone} == {"the stream was deleted"}


# Silence and the end -----------------------------------------------------------------------------
def test_silent_subscription_is_sent_its_progress(talk: Talk, stream: Stream) -> None:
    talk.done("connect", heartbeat="200ms")
    stream.fill(2)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(2)
    for _ in range(2):
        assert talk.next("hb") == {
            "op": "hb", "sid": "s", "last_consumer_seq": 2, "last_stream_seq": 2,
        }  # fmt: skip


def test_nothing_comes_after_the_answer_to_unsub(talk: Talk, stream: Stream) -> None:
    stream.fill(5)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(5)
    talk.done("unsub", sid="s")
    stream.publish()
    talk.nothing_more()
    assert talk.refused("ack", sid="s", seqs=[1])["name"] == "subscription_not_found"
    assert info(stream)["num_ack_pending"] == 5


def test_drained_subscription_still_takes_acks(talk: Talk, stream: Stream) -> None:
    stream.fill(3)
    stream.consumer()
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    talk.messages(3)
    talk.done("unsub", sid="s", drain=True)
    stream.publish()
    talk.nothing_more()
    talk.done("ack", sid="s", seqs=[1, 2])
    talk.done("ack", sid="s", seqs=[3])
    assert info(stream)["ack_floor"]["stream_seq"] == 3
    talk.done("sub", sid="s", stream=stream.name, consumer="c", credit=WHOLE)
    assert seqs(talk.messages(1)) == [4]


def test_published_while_pushed_every_message_comes_once_and_in_order(
    server: ServerProcess, stream: Stream
) -> None:
    count = 2_000

    def publish() -> None:
        with Talk(server.url, MSGPACK) as publisher:
            for number in range(count):
                publisher.send(
                    {"op": "pub", "id": number, "subject": stream.subject(), "data": b"x"}
                )
            for _ in range(count):
                publisher.next("ack")

    thread = threading.Thread(target=publish)
    with Talk(server.url, MSGPACK) as talk:
        credit = {"msgs": count}
        talk.done("sub", sid="s", stream=stream.name, ordered=True, credit=credit)
        thread.start()
        assert seqs(talk.messages(count)) == list(range(1, count + 1))
    thread.join()
