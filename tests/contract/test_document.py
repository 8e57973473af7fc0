"""Requests made up from the OpenAPI document are answered as the document says."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from contrail_common import errors
from tests.support.servers import ServerProcess

SCHEMA: Final = schemathesis.openapi.from_path(
    Path(__file__).parents[2] / "openapi" / "openapi.json"
)
OPERATIONS: Final = {
    one.label: one for one in (found.ok() for found in SCHEMA.get_all_operations())
}
ENDLESS: Final = "GET /v1/events"  # its answer has no end
DOCUMENTED: Final = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
EXAMPLES: Final = max(settings.default.max_examples // 20, 5)


STREAM: Final = "/v1/streams/ORDERS"
THERE: Final = {"stream": "ORDERS", "consumer": "worker", "subject": "orders.new"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of its own: the made-up streams may capture any subject."""
    with (
        ServerProcess(tmp_path_factory.mktemp("document") / "data") as running,
        running.client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


def prepare(client: httpx.Client) -> None:
    """Make the stream, a message and the consumer that requests are for, whatever came before."""
    if not client.put(STREAM, json={"subjects": ["orders.*"]}).is_success:
        for stream in client.get("/v1/streams").json()["items"]:
            assert client.delete(f"/v1/streams/{stream['config']['name']}").status_code == 204
        assert client.put(STREAM, json={"subjects": ["orders.*"]}).status_code == 201
    client.put(f"{STREAM}/consumers/worker", json={})
    client.post("/v1/subjects/orders.new/messages", content=b"1")


@pytest.mark.parametrize("label", [label for label in OPERATIONS if label != ENDLESS])
def test_answers_are_those_of_the_document(
    label: str, own: httpx.Client, session: requests.Session
) -> None:
    operation, base_url = OPERATIONS[label], str(own.base_url).rstrip("/")

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        prepare(own)
        for name, value in THERE.items():
            if name in case.path_parameters:
                case.path_parameters[name] = value
        answer = case.call(base_url=base_url, session=session)
        case.validate_response(answer, checks=DOCUMENTED)
        if answer.status_code >= 500:
            # Sequences that nothing has reached yet.
            assert answer.json()["type"].endswith(errors.RANGE_NOT_APPLIED.name), answer.text

    check()
