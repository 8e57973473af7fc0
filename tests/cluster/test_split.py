"""The split form: what the death of each process costs, and what recovers."""

import asyncio
import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from contrail_client import Contrail
from contrail_link.tcp.handshake import MAGIC
from tests.cluster.load import ALL, Load
from tests.cluster.test_kill_under_load import ACKS_BETWEEN_KILLS, PROGRESS_S, read_all
from tests.cluster.verdict import problems
from tests.contract.talk import Talk
from tests.support.ports import HOST, free_port
from tests.support.servers import TIMEOUT_S, Process, SplitServers

SEED: Final = 1_729
PATIENCE_S: Final = 180.0
STRANGERS: Final = 150
STREAM: Final = "/v1/streams/S"
NEXT: Final = f"{STREAM}/consumers/c/next"

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitServers]:
    with SplitServers(tmp_path_factory.mktemp("split")) as running:
        yield running


@pytest.fixture
def split(servers: SplitServers) -> SplitServers:
    """All processes, restarted if the previous test killed them, with a new stream `S`."""
    servers.start()
    with servers.client() as client:
        client.delete(STREAM)
        assert client.put(STREAM, json={"subjects": ["s.>"]}).status_code == 201
        assert client.put(f"{STREAM}/consumers/c", json={}).status_code == 201
    return servers


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.01)


def ready(edge: Process) -> bool:
    return httpx.get(f"{edge.url}/readyz", timeout=TIMEOUT_S).status_code == httpx.codes.OK


def waiting_pulls(split: SplitServers) -> int:
    count: int = httpx.get(f"{split.apis[0].url}{STREAM}/consumers/c", timeout=TIMEOUT_S).json()[
        "num_waiting"
    ]
    return count


def ask(edge: Process, method: str, target: str, **more: Any) -> httpx.Response:
    return httpx.request(method, f"{edge.url}{target}", timeout=60, **more)


def pull(pool: ThreadPoolExecutor, edge: Process) -> "Future[httpx.Response]":
    return pool.submit(ask, edge, "POST", NEXT, json={"expires": "60s"})


def publish(edge: Process) -> httpx.Response:
    return ask(edge, "POST", "/v1/subjects/s.a/messages", content=b"x")


# Storage -----------------------------------------------------------------------------------------
def kill_and_restart_storage(split: SplitServers, load: Load, kills: int) -> None:
    chance = random.Random(SEED)
    for _ in range(kills):
        wanted = load.journal.acknowledged + chance.randint(*ACKS_BETWEEN_KILLS)
        assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S), "publishing stands still"
        load.end_of_server()
        split.storage.kill()
        wait_until(lambda: not any(ready(edge) for edge in split.edges))
        split.storage.start()
        split.wait_until_ready(split.edges)
        load.server_is_up()
    wanted = load.journal.acknowledged + ACKS_BETWEEN_KILLS[0]
    assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S), "publishing stands still"


def test_storage_killed_under_load_loses_and_doubles_nothing(split: SplitServers) -> None:
    load = Load([edge.url for edge in split.edges], SEED)
    load.prepare()
    load.start()
    try:
        kill_and_restart_storage(split, load, kills=2)
        load.finish()
    finally:
        load.abandon()
    assert load.errors == []
    assert load.journal.unknown > 0, "no kill was noticed"
    with Contrail(split.gateways[1].url) as client:
        stored, replayed = read_all(client), list(client.replay("LOAD"))
    assert problems(load.journal, stored, replayed, eager_consumer=ALL) == [], f"seed {SEED}"


@contextlib.contextmanager
def strangers(address: tuple[str, int]) -> Iterator[None]:
    """Many connections without a valid handshake, which reconnect when they are closed."""
    over = asyncio.Event()

    async def come_back(said: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(*address)
                with contextlib.closing(writer):
                    writer.write(said)
                    await reader.read()

    async def crowd() -> None:
        loops.put(asyncio.get_running_loop())
        async with asyncio.TaskGroup() as group:
            said = (b"", MAGIC, MAGIC + bytes(63))
            tasks = [group.create_task(come_back(said[n % 3])) for n in range(STRANGERS)]
            await over.wait()
            for task in tasks:
                task.cancel()

    loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(asyncio.run, crowd())
        loop = loops.get()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(over.set)
            ended.result()


def test_strangers_at_the_link_port_keep_no_fresh_process_out(split: SplitServers) -> None:
    link = HOST, split.storage.settings["link_port"]
    with strangers(link):
        for edge in split.edges[:2]:  # an api and a gateway
            edge.kill()
            edge.start()
            split.wait_until_ready([edge])
            assert publish(edge).status_code == httpx.codes.CREATED


def test_storage_away_is_503_with_a_reason_everywhere_and_back_is_found(
    split: SplitServers, pool: ThreadPoolExecutor
) -> None:
    waits = [pull(pool, edge) for edge in split.edges]
    wait_until(lambda: waiting_pulls(split) == len(waits))
    assert split.storage.stop() == 0
    assert [wait.result().status_code for wait in waits] == [503] * len(waits)
    for edge in split.edges:
        verdict = ask(edge, "GET", "/readyz?verbose").json()
        assert "down" in verdict["errors"][0]["message"], verdict
        assert ask(edge, "GET", "/livez").status_code == 200
        for answer in (publish(edge), ask(edge, "GET", STREAM), ask(edge, "POST", NEXT)):
            assert answer.status_code == 503, answer.text
            assert answer.headers["retry-after"].isdigit()
            assert answer.json()["applied"] is False
    split.storage.start()
    split.wait_until_ready(split.edges)
    assert [publish(edge).json()["seq"] for edge in split.edges] == [1, 2, 3, 4]


# Edges -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["apis", "gateways"])
def test_dead_peer_is_passed_over_and_the_last_one_is_503(split: SplitServers, kind: str) -> None:
    dying: list[Process] = getattr(split, kind)
    living = [edge for edge in split.edges if edge not in dying]
    dying[0].kill()
    for edge in living * 4:
        assert publish(edge).status_code == 201
        assert ask(edge, "POST", NEXT).status_code == 200
    dying[1].kill()
    target = "/next" if kind == "gateways" else ""
    for edge in living:
        answer = ask(edge, "POST" if target else "GET", NEXT if target else STREAM)
        assert answer.status_code == 503
        assert answer.headers["retry-after"].isdigit()
        assert kind.removesuffix("s") in answer.json()["detail"]
    dying[0].start()
    wait_until(lambda: ready(dying[0]))
    assert all(publish(edge).status_code == 201 for edge in living)


def test_pull_whose_gateway_dies_is_answered_and_its_place_given_back(
    split: SplitServers, pool: ThreadPoolExecutor
) -> None:
    waits = [pull(pool, split.apis[0]) for _ in range(4)]
    wait_until(lambda: waiting_pulls(split) == 4)
    for gateway in split.gateways:
        gateway.kill()
    assert {wait.result().status_code for wait in waits} <= {503, 504}
    wait_until(lambda: waiting_pulls(split) == 0)


def test_client_that_leaves_a_forwarded_pull_leaves_no_one_waiting(split: SplitServers) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{split.apis[1].url}{NEXT}", json={"expires": "60s"}, timeout=httpx.Timeout(60, read=1)
        )
    wait_until(lambda: waiting_pulls(split) == 0)


def test_api_that_is_asked_to_stop_answers_what_waits_and_what_is_under_way(
    split: SplitServers, pool: ThreadPoolExecutor
) -> None:
    api, other = split.apis
    waits = [pull(pool, api) for _ in range(3)]
    waits += [pool.submit(ask, api, "GET", f"{STREAM}/messages?wait=60s")]
    wait_until(lambda: waiting_pulls(split) == 3)
    stopped = threading.Event()
    answers: list[int] = []

    def keep_publishing() -> None:
        with api.client() as client:
            while not stopped.is_set():
                try:
                    answer = client.post("/v1/subjects/s.a/messages", content=b"x")
                except httpx.TransportError:
                    return
                answers.append(answer.status_code)

    publisher = pool.submit(keep_publishing)
    wait_until(lambda: len(answers) > 5)
    assert api.stop() == 0
    stopped.set()
    publisher.result()
    assert {wait.result().status_code for wait in waits} <= {200, 503}
    stored = ask(other, "GET", STREAM).json()["state"]["messages"]
    assert answers.count(201) == stored
    assert publish(other).status_code == 201


def test_socket_through_an_api_is_a_gateways_and_ends_with_it(split: SplitServers) -> None:
    with Talk(split.apis[0].url) as talk:
        talk.done("sub", sid="x", stream="S", credit={"msgs": 10})
        publish(split.apis[1])
        assert talk.next("msgs")["messages"][0]["seq"] == 1
        for gateway in split.gateways:
            gateway.kill()
        with pytest.raises(ConnectionClosed):
            talk.socket.recv(timeout=PATIENCE_S)


def test_socket_while_no_gateway_lives_is_refused(split: SplitServers) -> None:
    for gateway in split.gateways:
        gateway.kill()
    lines = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        "sec-websocket-protocol": "contrail.v1.json",
    }
    answer = httpx.get(f"{split.apis[0].url}/v1/ws", headers=lines, timeout=TIMEOUT_S)
    assert answer.status_code == 503
    assert answer.json()["name"] == "not_ready"


# Secrets and settings ----------------------------------------------------------------------------
def _refused_clients(split: SplitServers) -> int:
    return split.storage.log.read_text().count("link_client_refused")


def test_api_with_another_secret_gets_nothing_and_disturbs_nobody(
    split: SplitServers, tmp_path: Path
) -> None:
    storage = split.apis[0].settings["storage"]
    log = tmp_path / "stranger.log"
    refused_before = _refused_clients(split)
    with Process("api", log, storage=storage, cluster_secret="of another cluster") as stranger:
        wait_until(lambda: "secret" in ask(stranger, "GET", "/readyz?verbose").text)
        assert ask(stranger, "GET", STREAM).status_code == 503
        assert all(map(ready, split.edges))
        # Logged once, however often the stranger tries, until a client of this cluster connects.
        assert max(refused_before, 1) <= _refused_clients(split) <= refused_before + 1


def test_forwarded_request_is_not_forwarded_again(tmp_path: Path) -> None:
    # A gateway that takes another gateway for an api.
    first, second = free_port(), free_port()
    common = {"cluster_secret": "the secret of a ring", "storage": f"{HOST}:{free_port()}"}
    log = tmp_path / "ring.log"
    with (
        Process("gateway", log, port=first, apis=f"{HOST}:{second}", **common) as gateway,
        Process("gateway", log, port=second, apis=f"{HOST}:{first}", **common),
    ):
        answer = ask(gateway, "GET", STREAM)
        assert answer.status_code == 503
        assert "api" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("service", "settings", "complaint"),
    [
        ("storage", {}, "cluster secret"),
        ("api", {"cluster_secret": "short"}, "16 bytes"),
        ("gateway", {"cluster_secret": "x" * 16, "apis": "nonsense"}, "nonsense"),
        ("api", {"cluster_secret": "x" * 16, "storage": "host:0"}, "port"),
        ("api", {"cluster_secret": "x" * 16, "storage": ""}, "storage"),
        ("gateway", {"cluster_secret_file": "missing.secret"}, "missing.secret"),
        ("storage", {"cluster_secret": "x" * 16, "apis": "a:1"}, "apis"),
        ("serve", {"node": "a.b"}, "node"),
        ("serve", {"access_log": "perhaps"}, "access_log"),
    ],
)
def test_bad_setting_ends_the_start_with_status_2(
    tmp_path: Path, service: str, settings: dict[str, str], complaint: str
) -> None:
    process = Process(service, tmp_path / "log", **settings)
    process.spawn()
    assert process.wait() == 2
    assert complaint in process.log.read_text()
