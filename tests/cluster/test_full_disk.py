"""A full or failing disk: publishes get 507, reads continue, and no restart is needed."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import httpx
import pytest

from contrail_common.model import PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from tests.crash.lives import wait_until
from tests.support.servers import PLAIN, TIMEOUT_S, ServerProcess

WAIT_S: Final = 180.0
PAYLOAD_BYTES: Final = 512 << 10
_SHIM: Final = Path(__file__).parents[1] / "support" / "failing_calls.c"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 192 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", "size=192M", "tmpfs", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def client() -> Iterator["Client"]:
    client = Client()
    yield client
    client.close()


def payload(number: int) -> bytes:
    return (b"%d " % number) * (PAYLOAD_BYTES // len(b"%d " % number))


class Client:
    """Publishes numbered messages, and knows which of them were acknowledged, by sequence."""

    def __init__(self) -> None:
        self._http = httpx.Client(verify=PLAIN, timeout=TIMEOUT_S)
        self.acked: dict[int, int] = {}
        self.unknown: set[int] = set()
        self._next = 0

    def close(self) -> None:
        self._http.close()

    def create(self) -> None:
        self._http.put("/v1/streams/S", json={"subjects": ["s.*"]}).raise_for_status()

    def turn_to(self, server: ServerProcess) -> None:
        """Send requests to `server` from now on."""
        self._http.close()
        self._http = server.client()

    def publish(self) -> httpx.Response:
        number, self._next = self._next, self._next + 1
        headers = {"Nats-Msg-Id": f"id-{number}"}
        path = f"/v1/subjects/s.{number % 5}/messages"
        answer = self._http.post(path, content=payload(number), headers=headers)
        if answer.status_code == 201:
            self.acked[answer.json()["seq"]] = number
        elif answer.status_code == 504:
            self.unknown.add(number)
        else:
            assert (answer.status_code, answer.json()["applied"]) in ((507, False), (503, False))
        return answer

    def fill(self) -> None:
        """Publish until nothing is accepted any more, even after a checkpoint has freed space."""
        refused = 0
        while refused < 8:
            if self.publish().status_code == 507:
                refused += 1
                self.look(sample=1)
            else:
                refused = 0

    def look(self, sample: int = 0) -> None:
        """Read acknowledged messages back by their sequences: all, or `sample` of them."""
        seqs = sorted(self.acked)
        for seq in seqs[-sample:] if sample else seqs:
            found = self._http.get(f"/v1/streams/S/messages/{seq}")
            assert (found.status_code, found.content) == (200, payload(self.acked[seq])), seq

    def purge(self, subject: str) -> None:
        self._http.post("/v1/streams/S/purge", json={"subject": subject}).raise_for_status()
        gone = int(subject.removeprefix("s."))
        self.acked = {seq: one for seq, one in self.acked.items() if one % 5 != gone}

    def not_ready(self) -> str:
        """The reason why storage is not ready; empty if it is ready."""
        answer = self._http.get("/readyz?verbose")
        if answer.status_code == 200:
            return ""
        return str([one["message"] for one in answer.json()["errors"]])


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "not reached"
        time.sleep(0.02)


def stop(server: ServerProcess) -> None:
    """SIGTERM ends the server cleanly in every state."""
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


@pytest.mark.cluster
def test_disk_that_fills_up_by_publishing_takes_deletes_and_heals(
    small_disk: Path, client: Client
) -> None:
    with ServerProcess(small_disk / "data") as server:
        client.turn_to(server)
        client.create()
        client.fill()
        assert client.acked
        assert not client.unknown
        assert not client.not_ready()
        client.look()
        for subject in ("s.0", "s.1", "s.2"):
            client.purge(subject)
        wait_for(lambda: client.publish().status_code == 201)
        client.fill()
        server.kill()
        server.start()
        client.turn_to(server)
        client.look()
        for subject in ("s.2", "s.3", "s.4"):
            client.purge(subject)
        wait_for(lambda: client.publish().status_code == 201)
        client.look()
        stop(server)


@pytest.mark.cluster
def test_disk_filled_by_others_is_served_for_reading_also_by_a_start(
    small_disk: Path, client: Client
) -> None:
    ballast = small_disk / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 12))

    with ServerProcess(small_disk / "data") as server:
        client.turn_to(server)
        client.create()
        for _ in range(30):
            assert client.publish().status_code == 201
        fill()
        wait_for(lambda: client.publish().status_code == 507)
        client.look()
        stop(server)
    fill()
    with ServerProcess(small_disk / "data") as server:
        client.turn_to(server)
        assert "No space left" in client.not_ready()
        client.look()
        refused = client.publish()
        assert (refused.status_code, refused.json()["applied"]) == (507, False)
        stop(server)
        server.start()
        client.turn_to(server)
        assert client.publish().status_code == 507
        ballast.unlink()
        wait_for(lambda: not client.not_ready())
        assert client.publish().status_code == 201
        client.look()
        stop(server)


@pytest.mark.cluster
@pytest.mark.parametrize("key", [(), (bytes(32),)], ids=["plain", "encrypted"])
def test_room_for_what_the_store_lacks_is_enough_to_open_it_again(
    small_disk: Path, key: tuple[bytes, ...]
) -> None:
    """A flush succeeded and its checkpoint did not: the log has more than the store lacks."""

    async def scene() -> None:
        options = NodeOptions(small_disk / "data", node_keys=key)
        node = StorageNode.open(options, SingleMemberGroups())
        await node.start()
        try:
            link = LocalLink(node)
            await link.put_stream(StreamConfig(name="S", subjects=("s.*",)), "put", None, False)
            for number in range(36):
                await publish(link, "S", [PublishMessage("s.a", None, payload(number))])
            await node.until_written()
            await asyncio.to_thread(node.raw_store.flush)
            log_bytes = node.log.stats.size_bytes
            left = log_bytes + (4 << 20)  # less than the log and the reserve together
            status = os.statvfs(small_disk)
            with (small_disk / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - left)
            node.healing.fail_store(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            assert node.readiness()
            await wait_until(lambda: not node.readiness())
            assert node.log.stats.size_bytes >= log_bytes
            for number in range(36):
                assert (await link.get_message("S", number + 1)).payload == payload(number)
        finally:
            await node.stop()

    asyncio.run(scene())


class PreloadedServer(ServerProcess):
    """A server whose calls to the disk the library of `shim` can make fail."""

    program: ClassVar = (sys.executable, "-m", "contrail_serve")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes calls fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler to make calls to the disk fail with")
    library = tmp_path_factory.mktemp("shim") / "failing_calls.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SHIM, "-ldl"], check=True)
    return library


@pytest.mark.cluster
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_store_whose_files_cannot_be_written_heals_by_itself(
    tmp_path: Path, shim: Path, client: Client, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    control = tmp_path / "fails"
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("FAIL_BELOW", str(tmp_path / "data" / "store"))
    monkeypatch.setenv("FAIL_WITH", str(control))
    with PreloadedServer(tmp_path / "data") as server:
        client.turn_to(server)
        client.create()
        for _ in range(20):
            assert client.publish().status_code == 201
        control.write_text(str(int(number)))
        wait_for(lambda: client.publish().status_code in (503, 507))
        wait_for(lambda: os.strerror(number) in client.not_ready())
        client.look(sample=50)
        control.unlink()
        wait_for(lambda: not client.not_ready())
        wait_for(lambda: client.publish().status_code == 201)
        client.look()
        control.write_text(str(int(number)))
        stop(server)
        server.start()
        client.turn_to(server)
        client.look()
        assert client.publish().status_code in (503, 507)
        control.unlink()
        wait_for(lambda: not client.not_ready())
        assert client.publish().status_code == 201
        client.look()
        stop(server)
