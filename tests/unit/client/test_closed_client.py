"""What is left of a client that was closed says so, and waits for nothing."""

import pytest

from contrail_client import Closed, Contrail
from contrail_client.live.blocking import INBOX_MAX


def test_publisher_of_a_closed_client_fails_each_message() -> None:
    client = Contrail("http://127.0.0.1:9", reconnect_s=0.0)
    publisher = client.publisher()
    client.close()

    publications = [publisher.publish("a.b", b"x") for _ in range(INBOX_MAX + 1)]

    for publication in publications:
        with pytest.raises(Closed):
            publication.result(timeout=0)
    with pytest.raises(Closed):
        publisher.flush()
    publisher.close()
