"""How a server is reached, and how it looks when it is not."""

import asyncio
import ssl

import pytest

from contrail_client.errors import ContrailError, UnexpectedAnswer, Unreachable
from contrail_client.live.websocket import open_socket
from contrail_client.transport import Options
from tests.support.each import each


@each("url", ["http://127.0.0.1:7420", "http://localhost:1", "http://[::1]"])
def test_plain_http_on_this_machine_reads_no_certificates_and_trusts_none(url: str) -> None:
    context = Options(url=url).for_httpx()["verify"]
    assert context.get_ca_certs() == []
    assert context.verify_mode is ssl.CERT_REQUIRED


@each("url", ["https://127.0.0.1", "http://a.example", "https://a.example"])
def test_certificates_are_read_where_a_server_or_a_proxy_may_show_one(url: str) -> None:
    assert "verify" not in Options(url=url).for_httpx()


@each(
    ("answer", "error"),
    [(b"", Unreachable), (b"HTTP/1.1 101 Swit", Unreachable), (b"+PONG\r\n", UnexpectedAnswer)],
    ids=["closed at once", "closed in its answer", "no HTTP"],
)
def test_socket_that_is_not_opened_is_tried_again_only_where_the_server_went_away(
    answer: bytes, error: type[ContrailError]
) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async def scene() -> None:
        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(error):
                await open_socket(Options(url=f"http://127.0.0.1:{port}"))

    asyncio.run(scene())
