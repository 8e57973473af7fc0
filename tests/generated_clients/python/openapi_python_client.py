"""The scenario with a client of openapi-python-client. Arguments: server URL, stream name."""

import json
import sys
from io import BytesIO
from typing import Any

from contrail_http_api_client import Client
from contrail_http_api_client.api.consumers import create_consumer
from contrail_http_api_client.api.delivery import acknowledge, pull
from contrail_http_api_client.api.publishing import publish
from contrail_http_api_client.api.reading import get_message, get_message_json
from contrail_http_api_client.api.streams import create_stream, get_stream, put_stream
from contrail_http_api_client.models import (
    AckBody,
    AckRequest,
    ConsumerConfigBody,
    Problem,
    PullBody,
    StreamConfigBody,
)
from contrail_http_api_client.types import File

PAYLOADS = (b"first", b"\x00\xff\x01", b"third")
FAR = 3_000_000_000


def scenario(client: Client, stream: str) -> dict[str, Any]:
    config = StreamConfigBody(name=stream, subjects=[f"{stream}.>"], max_age="1h")
    create_stream.sync(client=client, body=config)
    subject = f"{stream}.a"
    acks = [publish.sync(subject, client=client, body=File(BytesIO(one))) for one in PAYLOADS]

    create_consumer.sync(stream, client=client, body=ConsumerConfigBody(name="worker"))
    pulled = pull.sync(stream, "worker", client=client, body=PullBody(batch=3, expires="5s"))
    tokens = [AckRequest(token=message.ack_token) for message in pulled.messages]
    settled = acknowledge.sync(
        stream, "worker", client=client, body=AckBody(acks=tokens, sync=True)
    )
    payload = get_message.sync(stream, 2, client=client).payload.read()

    etag = get_stream.sync_detailed(stream, client=client).headers["etag"]
    config.description = "guarded"
    updated = put_stream.sync(stream, client=client, body=config, if_match=etag)
    stale = put_stream.sync(stream, client=client, body=config, if_match=etag)
    missing = get_stream.sync("NONE", client=client)
    assert isinstance(stale, Problem)
    assert isinstance(missing, Problem)

    far = StreamConfigBody(name=f"{stream}-far", subjects=[f"{stream}-far"], first_seq=FAR)
    create_stream.sync(client=client, body=far)
    far_ack = publish.sync(f"{stream}-far", client=client, body=File(BytesIO(b"far")))
    far_message = get_message_json.sync(f"{stream}-far", far_ack.seq, client=client)
    return {
        "published": [ack.seq for ack in acks],
        "pulled": [message.seq for message in pulled.messages],
        "acked": [result.ok for result in settled.results],
        "payload": payload.hex(),
        "updated": updated.config.description,
        "stale": [stale.status, stale.name],
        "missing": [missing.status, missing.code, missing.name],
        "far": [far_ack.seq, far_message.seq, far_message.data],
    }


if __name__ == "__main__":
    with Client(base_url=sys.argv[1]) as opened:
        print(json.dumps(scenario(opened, sys.argv[2])))
