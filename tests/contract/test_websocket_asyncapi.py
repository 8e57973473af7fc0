"""Real frames of a scripted session are what the AsyncAPI document says."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.contract.conftest import Stream
from tests.contract.talk import Frame, Talk
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.split

DOCUMENT: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "openapi" / "asyncapi.yaml").read_text(encoding="utf-8")
)
WHOLE = {"msgs": 100, "bytes": 1 << 20}


def validators(operation: str) -> dict[str, list[Draft202012Validator]]:
    """For each op the schemas of its messages."""
    found: dict[str, list[Draft202012Validator]] = {}
    components = DOCUMENT["components"]
    for reference in DOCUMENT["operations"][operation]["messages"]:
        message = components["messages"][reference["$ref"].rpartition("/")[2]]
        schema = {**message["payload"], "components": components}
        found.setdefault(message["name"], []).append(Draft202012Validator(schema))
    return found


class Recorded(Talk):
    """A connection that keeps every frame in both directions."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.sent: list[Frame] = []
        self.received: list[Frame] = []

    def send(self, *frames: Frame) -> None:
        self.sent += frames
        super().send(*frames)

    def next(self, op: str | None = None, timeout_s: float = 20.0) -> Frame:
        frame = super().next(op, timeout_s)
        self.received.append(frame)
        return frame


def scripted(talk: Recorded, stream: Stream) -> None:
    """One session with every operation and every kind of answer but ``drain``."""
    talk.done("connect", client="script", heartbeat="300ms", token="any")
    for number in range(12):
        fields: dict[str, Any] = {"data": str(number), "headers": {"H": ["v"]}, "msg_id": "m"}
        if number:
            fields = {"json": {"n": number}, "expected": {"stream": stream.name}}
        talk.ask("pub", subject=stream.subject(), **fields)
    talk.ask("pub", subject=stream.subject(), data="again", msg_id="m")
    talk.refused("pub", subject="nobody.captures.this", data_base64="AA==")
    messages = [{"subject": stream.subject(), "data": "x"}, {"subject": "elsewhere", "data": "x"}]
    talk.ask("pub_batch", stream=stream.name, messages=messages)
    stream.consumer()
    talk.done("sub", sid="c", stream=stream.name, consumer="c", credit={"msgs": 4})
    first, second, third, fourth = talk.messages(4)
    talk.done("ack", sid="c", seqs=[first["seq"]], tokens=[first["ack_token"]])
    talk.done("nak", sid="c", ranges=[[second["seq"], second["seq"]]], delay="1h")
    talk.done("term", sid="c", seqs=[third["seq"]], reason="odd")
    talk.done("in_progress", sid="c", seqs=[fourth["seq"]])
    talk.done("credit", sid="c", bytes=10)
    assert talk.next("hb")["sid"] == "c"
    talk.done("unsub", sid="c", drain=False)
    talk.done(
        "sub",
        sid="o",
        stream=stream.name,
        ordered=True,
        filter_subjects=[stream.subject()],
        deliver_policy="by_start_sequence",
        opt_start_seq=1,
        replay_policy="instant",
        credit={"msgs": 1},
    )
    talk.messages(1)
    stream.client.post(f"{stream.path}/purge", json={"up_to_seq": 6})
    talk.done("credit", sid="o", **WHOLE)
    talk.next("gap")
    talk.messages(8)
    talk.refused("watch", sid="w", bucket="b")
    talk.ask("ping")
    stream.client.delete(stream.path)
    while talk.next()["op"] != "gone":
        pass


def test_frames_of_a_session_are_as_described(server: ServerProcess, stream: Stream) -> None:
    with Recorded(server.url) as talk:
        scripted(talk, stream)
    for operation, frames in (("fromClient", talk.sent), ("fromServer", talk.received)):
        known = validators(operation)
        for frame in frames:
            fits = [one for one in known[frame["op"]] if one.is_valid(frame)]
            assert fits, (frame, [list(one.iter_errors(frame)) for one in known[frame["op"]]])
        seen = {frame["op"] for frame in frames}
        assert set(known) - seen <= {"drain"}, "the script leaves something out"
