"""Encrypted folders of real processes: unreadable, refused without a key, rotated under load."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from contrail_client import Contrail
from tests.cluster.load import ALL, Load
from tests.cluster.test_kill_under_load import read_all
from tests.cluster.verdict import problems
from tests.support.folders import files_with
from tests.support.servers import SECRET, Process, ServerProcess

FIRST, SECOND, THIRD = (f"{number:064x}" for number in (1, 2, 3))
PATIENCE_S: Final = 180.0
PROGRESS_S: Final = 180.0
SEED: Final = 815
WORDS: Final = ("HiddenStream", "hidden-subject", "hidden-payload", "Hidden-Header", "hidden-value",
                "HiddenConsumer", "hidden-id")  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "node.key"
    path.touch(mode=0o600)
    path.write_text(FIRST)
    return path


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def rotate(server: Process, key_file: Path, text: str, event: str) -> None:
    """Replace the keys in the file, make the server reload it, and wait for the log event."""
    count_before = server.log.read_text().count(event)
    key_file.write_text(text)
    os.kill(server.pid, signal.SIGHUP)
    wait_until(lambda: server.log.read_text().count(event) > count_before)


def status_of(process: Process) -> int:
    """The exit status of a process that does not serve."""
    process.spawn()
    return process.wait()


def publish_words(url: str) -> None:
    stream, subject, payload, header, value, consumer, message_id = WORDS
    with Contrail(url) as client:
        client.ensure_stream(stream, {"subjects": [f"{subject}.>"], "description": payload})
        client.ensure_consumer(stream, consumer, {"filter_subjects": [f"{subject}.a"]})
        for number in range(50):
            client.publish(
                f"{subject}.a",
                payload.encode() * 20,
                headers={header: value},
                msg_id=f"{message_id}-{number}",
            )
        assert len(client.consumer(stream, consumer).next(10)) == 10


def files_with_words(folder: Path) -> list[str]:
    """The files that contain one of the words. A file written by hand proves that this works."""
    (folder / "proof").write_text(WORDS[-1])
    return list(files_with(folder, [word.encode() for word in WORDS]))


@pytest.mark.cluster
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_no_file_of_an_encrypted_folder_shows_what_was_published(
    tmp_path: Path, key_file: Path, ending: str
) -> None:
    data_dir = tmp_path / "data"
    with ServerProcess(data_dir, encryption_key_file=key_file) as server:
        publish_words(server.url)
        if ending == "stop":
            assert server.stop() == 0
        else:
            server.kill()
    assert files_with_words(data_dir) == ["proof"]
    with ServerProcess(data_dir, encryption_key_file=key_file) as server:
        with Contrail(server.url) as client:
            first = client.get_message(WORDS[0], 1)
            assert (first.subject, first.data) == ("hidden-subject.a", "hidden-payload" * 20)
        server.kill()
    assert files_with_words(data_dir) == ["proof"]


@pytest.mark.cluster
def test_folder_is_refused_without_its_key_and_served_with_it(
    tmp_path: Path, key_file: Path
) -> None:
    data_dir = tmp_path / "data"
    with ServerProcess(data_dir, encryption_key_file=key_file) as server:
        publish_words(server.url)
        server.kill()
    without = ServerProcess(data_dir)
    assert status_of(without) == 1
    assert "no encryption key was given" in without.log.read_text()
    key_file.write_text(SECOND)
    storage = Process(
        "storage", tmp_path / "storage.log", data_dir=data_dir, cluster_secret=SECRET, link_port=0,
        encryption_key_file=key_file,
    )  # fmt: skip
    assert status_of(storage) == 1
    assert "given encryption keys opens it" in storage.log.read_text()
    with ServerProcess(data_dir, encryption_key=FIRST) as server, Contrail(server.url) as client:
        assert client.get_stream(WORDS[0]).state.messages == 50


@pytest.mark.cluster
def test_plain_folder_is_refused_with_a_key_and_says_how_to_move(
    tmp_path: Path, key_file: Path
) -> None:
    data_dir = tmp_path / "data"
    with ServerProcess(data_dir) as server:
        publish_words(server.url)
        assert server.stop() == 0
    server = ServerProcess(data_dir, encryption_key_file=key_file)
    assert status_of(server) == 1
    assert "new folder" in server.log.read_text()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "no encryption key"), (FIRST + "\nabc\n", "line 2"), (None, "cannot be read")],
)
def test_key_file_that_cannot_be_used_ends_the_start_with_status_2(
    tmp_path: Path, text: str | None, complaint: str
) -> None:
    path = tmp_path / "node.key"
    if text is not None:
        path.write_text(text)
    server = ServerProcess(tmp_path / "data", encryption_key_file=path)
    assert status_of(server) == 2
    assert complaint in server.log.read_text()
    assert not server.data_dir.exists()


@pytest.mark.cluster
def test_key_is_rotated_under_load_and_the_new_one_alone_opens_all(
    tmp_path: Path, key_file: Path
) -> None:
    with ServerProcess(tmp_path / "data", encryption_key_file=key_file) as server:
        load = Load([server.url], SEED)
        load.prepare()
        load.start()
        try:
            for text, event in (
                (f"{SECOND}\n{FIRST}\n", "encryption_key_changed"),
                ("not a key", "encryption_key_refused"),
                (SECOND, "encryption_key_unchanged"),
                (f"{THIRD}\n{SECOND}\n", "encryption_key_changed"),
            ):
                wanted = load.journal.acknowledged + 100
                assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S)
                rotate(server, key_file, text, event)
            wanted = load.journal.acknowledged + 100
            assert load.journal.wait_for_acknowledged(wanted, PROGRESS_S)
            load.end_of_server()
            server.kill()
            key_file.write_text(f"{FIRST}\n{SECOND}\n")
            assert status_of(server) == 1
            key_file.write_text(THIRD)
            server.start()
            load.server_is_up()
            load.finish()
        finally:
            load.abandon()
        assert load.errors == []
        with Contrail(server.url) as client:
            stored, replayed = read_all(client), list(client.replay("LOAD"))
    assert problems(load.journal, stored, replayed, eager_consumer=ALL) == []


@pytest.mark.cluster
def test_key_file_that_everybody_can_read_is_warned_of(tmp_path: Path, key_file: Path) -> None:
    event = "encryption_key_file_open_to_all"
    with ServerProcess(tmp_path / "data", encryption_key_file=key_file) as server:
        assert event not in server.log.read_text()
        key_file.chmod(0o644)
        rotate(server, key_file, SECOND, event)
        assert server.stop() == 0


def test_key_in_the_environment_is_not_shown(tmp_path: Path) -> None:
    shown = subprocess.run(
        [
            *(sys.executable, "-m", "contrail_client", "config", "storage"),
            *("--encryption-key-file", "some.file"),
        ],
        env={**os.environ, "CONTRAIL_ENCRYPTION_KEY": FIRST, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    ).stdout
    assert "some.file" in shown
    assert "(hidden)" in shown
    assert FIRST not in shown
