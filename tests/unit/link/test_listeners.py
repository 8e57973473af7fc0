"""Connections are handed out or left to the kernel, whenever accepting stops."""

import asyncio
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import uvloop

from contrail_link.contract import StorageLink
from contrail_link.tcp.listeners import Listener
from tests.unit.link.link_rig import HOST, bound, port_of, remote, served, until
from tests.unit.link.routed_rig import Cluster, FakeNode

LOOPS = [asyncio.run, uvloop.run]
PASSES_MAX = 8


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let the process open no further file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("run", LOOPS)
@pytest.mark.parametrize("passes", range(PASSES_MAX))
def test_no_connection_is_lost_when_accepting_stops(run: Callable[..., None], passes: int) -> None:
    async def scene() -> None:
        accepted: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(listening, lambda connection, _: accepted.append(connection))
            client = socket.create_connection(listening.getsockname())
            for _ in range(passes):
                await asyncio.sleep(0)
            listener.close()
        with client:
            if accepted:
                accepted[0].close()
                assert client.recv(1) == b""
            else:
                with pytest.raises(ConnectionResetError):
                    client.recv(1)

    run(scene())


@pytest.mark.parametrize("run", LOOPS)
def test_a_connection_waits_for_a_descriptor(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contrail_link.tcp.listeners._NO_DESCRIPTOR_PAUSE_S", 0.01)

    async def scene() -> None:
        accepted: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listener = Listener(listening, lambda connection, _: accepted.append(connection))
            with socket.create_connection(listening.getsockname()) as client:
                with no_descriptor_left():
                    for _ in range(PASSES_MAX):
                        await asyncio.sleep(0)
                    assert not accepted
                async with asyncio.timeout(60):
                    while not accepted:
                        await asyncio.sleep(0)
                assert accepted[0].getpeername() == client.getsockname()
                accepted[0].close()
            listener.close()

    run(scene())


@pytest.mark.parametrize("run", LOOPS)
def test_connection_that_is_given_up_while_it_begins_leaves_nothing_open(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with served(cast(StorageLink, FakeNode(Cluster(1), "n0"))) as (server, port):
            admits = server.admits

            def admits_and_gives_up() -> bool:
                for task in server._beginning:
                    task.cancel()
                return admits()

            monkeypatch.setattr(server, "admits", admits_and_gives_up)
            for _ in range(3):
                reader, writer = await asyncio.open_connection(HOST, port)
                with suppress(ConnectionError):
                    await reader.read()
                writer.close()
            await until(lambda: not server.connections and not server.waiting_for_tls)
            assert server.refused == 3
            # The next client finds a place.
            monkeypatch.setattr(server, "admits", admits)
            async with remote(port):
                assert len(server.connections) == 2

    run(asyncio.wait_for(scenario(), 60))


def test_client_does_not_hold_the_port_of_a_server_that_is_not_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel gives the client the very port to which it tries to connect."""

    async def scenario() -> None:
        listening = bound()
        port = port_of(listening)
        listening.close()
        loop = asyncio.get_running_loop()
        connect, connected = loop.create_connection, 0

        async def connect_from_there(*args: Any, **options: Any) -> Any:
            nonlocal connected
            found = await connect(*args, **options, local_addr=None if connected else (HOST, port))
            connected += 1
            return found

        monkeypatch.setattr(loop, "create_connection", connect_from_there)
        async with remote(port, up=False) as link:
            # Either of the two connections may be the first.
            await until(lambda: any("leads to itself" in one.why for one in link.channels.values()))
            await asyncio.sleep(0)  # the transport closes the socket in the next pass
            async with served(cast(StorageLink, FakeNode(Cluster(1), "n0")), port):
                await until(lambda: not link.readiness())

    asyncio.run(scenario())
