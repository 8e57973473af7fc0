"""The scenario with a Python client of openapi-generator. Arguments: server URL, stream name."""

import json
import sys
from typing import Any

from openapi_client import (
    AckBody,
    AckRequest,
    ApiClient,
    Configuration,
    ConsumerConfigBody,
    ConsumersApi,
    DeliveryApi,
    PublishingApi,
    PullBody,
    ReadingApi,
    StreamConfigBody,
    StreamsApi,
)
from openapi_client.exceptions import ApiException, NotFoundException

PAYLOADS = (b"first", b"\x00\xff\x01", b"third")
FAR = 3_000_000_000


def scenario(client: ApiClient, stream: str) -> dict[str, Any]:
    streams, publishing, reading = StreamsApi(client), PublishingApi(client), ReadingApi(client)
    consumers, delivery = ConsumersApi(client), DeliveryApi(client)

    config = StreamConfigBody(name=stream, subjects=[f"{stream}.>"], max_age="1h")
    streams.create_stream(config)
    acks = [publishing.publish(f"{stream}.a", body=payload) for payload in PAYLOADS]

    consumers.create_consumer(stream, ConsumerConfigBody(name="worker"))
    pulled = delivery.pull(stream, "worker", pull_body=PullBody(batch=3, expires="5s"))
    tokens = [AckRequest(token=message.ack_token) for message in pulled.messages]
    settled = delivery.acknowledge(stream, "worker", AckBody(acks=tokens, sync=True))
    payload = reading.get_message(stream, 2)

    etag = streams.get_stream_with_http_info(stream).headers["etag"]
    config.description = "guarded"
    updated = streams.put_stream(stream, config, if_match=etag)
    try:
        streams.put_stream(stream, config, if_match=etag)
    except ApiException as error:
        stale = error.data
    try:
        streams.get_stream("NONE")
    except NotFoundException as error:
        missing = error.data

    far = StreamConfigBody(name=f"{stream}-far", subjects=[f"{stream}-far"], first_seq=FAR)
    streams.create_stream(far)
    far_ack = publishing.publish(f"{stream}-far", body=b"far")
    far_message = reading.get_message_json(f"{stream}-far", far_ack.seq)
    return {
        "published": [ack.seq for ack in acks],
        "pulled": [message.seq for message in pulled.messages],
        "acked": [result.ok for result in settled.results],
        "payload": bytes(payload).hex(),
        "updated": updated.config.description,
        "stale": [stale.status, stale.name],
        "missing": [missing.status, missing.code, missing.name],
        "far": [far_ack.seq, far_message.seq, far_message.data],
    }


if __name__ == "__main__":
    with ApiClient(Configuration(host=sys.argv[1])) as opened:
        print(json.dumps(scenario(opened, sys.argv[2])))
