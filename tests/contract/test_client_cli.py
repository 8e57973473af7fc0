"""The `contrail` command against a real server: what it prints, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from contrail_client import Contrail, Message
from tests.contract.client_rig import new_stream
from tests.support.command import run_contrail
from tests.support.each import each
from tests.support.servers import ServerProcess

TIMEOUT_S = 60.0


class Shell:
    """Runs the command against a server, with a stream of its own."""

    def __init__(self, url: str, stream: str) -> None:
        self.url = url
        self.stream = stream
        self.env = {"CONTRAIL_URL": url, "CONTRAIL_TOKEN": None, "CONTRAIL_CONFIG": None}

    def try_(self, *arguments: str, stdin: bytes | None = None) -> Result:
        """Run it in this process, however it ends."""
        return run_contrail(*arguments, env=self.env, stdin=stdin)

    def run(self, *arguments: str, stdin: bytes | None = None) -> str:
        """Run it; it must succeed. Answers its output."""
        result = self.try_(*arguments, stdin=stdin)
        assert result.exit_code == 0, (result.output, result.stderr)
        return result.stdout

    def json(self, *arguments: str, stdin: bytes | None = None) -> list[Any]:
        """The values that it prints with ``--json``, one a line."""
        return [
            json.loads(line)
            for line in self.run(*arguments, "--json", stdin=stdin).split("\n")[:-1]
        ]

    def process(self, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start it as a process of its own."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CONTRAIL_")}
        return subprocess.Popen(
            [sys.executable, "-m", "contrail_client", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "CONTRAIL_URL": self.url},
            **options,
        )

    def fill(self, count: int) -> None:
        """Store messages on the subjects ``0`` to ``2``, their payloads by number."""
        messages = [Message(f"{self.stream}.{n % 3}", str(n)) for n in range(1, count + 1)]
        with Contrail(self.url) as client:
            client.publish_batch(self.stream, messages).raise_refused()


@pytest.fixture
def shell(live: ServerProcess) -> Shell:
    """The command with a stream that captures what lies below its name."""
    return Shell(live.url, new_stream(live.url))


def test_stream_is_made_shown_changed_and_removed(shell: Shell) -> None:
    [made] = shell.json("stream", "create", "NEW", "--subject", "new.>", "--max-age", "1d")
    assert (made["config"]["subjects"], made["config"]["max_age"]) == (["new.>"], "1d")
    [edited] = shell.json("stream", "edit", "NEW", "--set", "max_msgs=5", "--set", "max_age=null")
    assert (edited["config"]["max_msgs"], edited["config"]["max_age"]) == (5, "0s")
    assert edited["config"]["subjects"] == ["new.>"]
    assert "NEW" in [info["config"]["name"] for info in shell.json("stream", "ls")]
    assert "new.>" in shell.run("stream", "info", "NEW")
    shell.run("pub", "new.a", "x" * 2000)
    [sealed] = shell.json("stream", "seal", "NEW", "--yes")
    assert sealed["config"]["sealed"] is True
    assert shell.run("stream", "rm", "NEW", "--yes").startswith("NEW removed, with 1 message (")
    assert shell.try_("stream", "info", "NEW").exit_code == 3


def test_fields_of_a_stream_may_come_from_a_file_or_stdin(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "fields.json"
    file.write_text('{"subjects": ["file.>"], "max_msgs": 7}')
    [made] = shell.json("stream", "create", "FILE", "--fields", str(file))
    assert made["config"]["max_msgs"] == 7
    [made] = shell.json("stream", "edit", "FILE", "--fields", "-", stdin=b'{"max_msgs": 8}')
    assert made["config"]["max_msgs"] == 8
    shell.run("stream", "rm", "FILE", "--yes")


def test_messages_of_a_stream_are_shown_and_deleted(shell: Shell) -> None:
    name = shell.stream
    shell.fill(6)
    assert shell.json("stream", "subjects", name) == [
        {"subject": f"{name}.{n}", "messages": 2} for n in range(3)
    ]
    [message] = shell.json("stream", "get", name, "4")
    assert (message["subject"], message["data"]) == (f"{name}.1", "4")
    assert shell.run("stream", "get", name, "4", "--raw") == "4\n"
    last = shell.json("stream", "last", name, "--subject", f"{name}.2")
    assert [each["seq"] for each in last] == [5]
    before = shell.json("stream", "last", name, "--up-to-seq", "4")
    assert [each["seq"] for each in before] == [2, 3, 4]
    assert shell.json("stream", "last", name, "--up-to-time", "2000-01-01T00:00:00Z") == []
    shell.run("stream", "delete-message", name, "4", "--yes")
    assert shell.try_("stream", "get", name, "4").exit_code == 3
    assert shell.json("stream", "deleted", name) == [{"first_seq": 4, "last_seq": 4}]
    assert "first" in shell.run("stream", "deleted", name)
    assert shell.json("stream", "purge", name, "--keep", "2", "--yes") == [{"purged": 3}]


def test_published_messages_may_have_a_time_to_live(shell: Shell) -> None:
    name = shell.stream
    refused = shell.try_("pub", f"{name}.a", "x", "--ttl", "1h")
    assert refused.exit_code == 1
    assert "per-message TTL" in refused.stderr
    shell.run("stream", "edit", name, "--set", "allow_msg_ttl=true")
    shell.run("pub", f"{name}.a", "x", "--ttl", "1h")
    shell.run("pub", f"{name}.a", "x", "--ttl", "never", "--count", "2")
    for seq, ttl in ((1, "1h"), (2, "never"), (3, "never")):
        [message] = shell.json("stream", "get", name, str(seq))
        assert message["headers"]["Nats-TTL"] == [ttl]


def test_consumer_is_made_shown_changed_and_removed(shell: Shell) -> None:
    name = shell.stream
    shell.fill(3)
    made = shell.json("consumer", "create", name, "c", "--ack-wait", "9s", "--filter", f"{name}.1")
    assert made[0]["config"]["ack_wait"] == "9s"
    [edited] = shell.json("consumer", "edit", name, "c", "--max-deliver", "4")
    assert (edited["config"]["max_deliver"], edited["config"]["ack_wait"]) == (4, "9s")
    [info] = shell.json("consumer", "info", name, "c")
    assert info["num_pending"] == 1
    assert [each["name"] for each in shell.json("consumer", "ls", name)] == ["c"]
    assert "c" in shell.run("consumer", "ls", name)
    shell.run("consumer", "rm", name, "c", "--yes")
    assert shell.try_("consumer", "info", name, "c").exit_code == 3


def test_one_message_is_published(shell: Shell) -> None:
    subject = f"{shell.stream}.a"
    assert shell.run("pub", subject, "one") == f"{shell.stream} 1\n"
    [ack] = shell.json("pub", subject, "-", "--msg-id", "x", "-H", "A=1", stdin=b"\x00two\n")
    assert (ack["seq"], ack["duplicate"]) == (2, False)
    assert "(duplicate)" in shell.run("pub", subject, "again", "--msg-id", "x")
    [stored] = shell.json("stream", "get", shell.stream, "2")
    assert stored["headers"] == {"A": ["1"], "Nats-Msg-Id": ["x"]}
    assert stored["data"] == "\x00two\n"


def test_many_messages_are_published_and_each_ack_is_reported(shell: Shell) -> None:
    subject = f"{shell.stream}.a"
    acks = shell.json("pub", subject, "x", "--count", "300", "--outstanding", "7")
    assert [ack["seq"] for ack in acks] == list(range(1, 301))
    assert "300 stored" in shell.run("pub", subject, "x", "--count", "300")


def test_each_line_of_stdin_is_a_message(shell: Shell) -> None:
    shell.run("pub", f"{shell.stream}.a", "--lines", stdin=b"one\ntwo\r\n\nlast")
    assert shell.run("replay", shell.stream, "--raw") == "one\ntwo\n\nlast\n"


def test_message_without_a_promise_is_taken(shell: Shell) -> None:
    assert shell.run("pub", f"{shell.stream}.a", "x", "--ack", "none") == ""
    assert shell.run("sub", shell.stream, "--start", "all", "--count", "1", "--raw") == "x\n"


def test_pull_prints_and_acknowledges(shell: Shell) -> None:
    shell.fill(3)
    shell.run("consumer", "create", shell.stream, "c")
    found = shell.json("next", shell.stream, "c", "--batch", "2")
    assert [each["seq"] for each in found] == [1, 2]
    assert shell.run("next", shell.stream, "c", "--no-ack", "--raw") == "3\n"
    [info] = shell.json("consumer", "info", shell.stream, "c")
    assert (info["ack_floor"]["stream_seq"], info["num_ack_pending"]) == (2, 1)


def test_subscription_prints_what_is_pushed_and_acknowledges_it(shell: Shell) -> None:
    shell.fill(20)
    shell.run("consumer", "create", shell.stream, "c")
    found = shell.json("sub", shell.stream, "c", "--count", "5")
    assert [each["data"] for each in found] == ["1", "2", "3", "4", "5"]
    assert all(each["ack_token"] for each in found)
    assert len(shell.run("sub", shell.stream, "c", "--wait", "0.2").splitlines()) == 15
    [info] = shell.json("consumer", "info", shell.stream, "c")
    assert (info["num_pending"], info["num_ack_pending"]) == (0, 0)


def test_reading_without_a_consumer_is_in_order_from_the_given_start(shell: Shell) -> None:
    name = shell.stream
    shell.fill(9)
    found = shell.json("sub", name, "--start", "4", "--filter", f"{name}.2", "--count", "2")
    assert [each["seq"] for each in found] == [5, 8]
    assert "ack_token" not in found[0]
    assert shell.run("sub", name, "--start", "last", "--count", "1", "--raw") == "9\n"
    assert shell.run("sub", name, "--wait", "0.05") == ""
    since = shell.json("stream", "get", name, "1")[0]["time"]
    assert shell.run("sub", name, "--start", since, "--count", "1", "--raw") == "1\n"


def test_gap_is_reported_beside_the_messages(shell: Shell) -> None:
    shell.fill(5)
    shell.run("stream", "purge", shell.stream, "--up-to-seq", "4", "--yes")
    result = shell.try_("sub", shell.stream, "--start", "1", "--count", "2", "--raw")
    assert result.stdout == "4\n5\n"
    assert "1 to 3 are missing" in result.stderr


def test_replay_prints_a_range(shell: Shell) -> None:
    shell.fill(9)
    found = shell.json("replay", shell.stream, "--from-seq", "3", "--to-seq", "5")
    assert [each["seq"] for each in found] == [3, 4, 5]
    only = ("--subject", f"{shell.stream}.1")
    assert len(shell.run("replay", shell.stream, *only).splitlines()) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        ("pub", "--mode", "sync"),
        ("pub", "--mode", "async", "--outstanding", "10"),
        ("pub", "--mode", "batch", "--batch", "7"),
        ("sub",),
        ("sub", "--ordered"),
        ("pull", "--batch", "7"),
        ("latency", "--rate", "2000"),
    ],
)
def test_bench_measures_and_removes_its_stream(shell: Shell, arguments: tuple[str, ...]) -> None:
    [found] = shell.json("bench", *arguments, "--messages", "30", "--size", "20")
    assert (found["messages"], found["messages_per_second"] > 0) == (30, True)
    if arguments[0] != "sub":
        assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    names = [info["config"]["name"] for info in shell.json("stream", "ls")]
    assert not [name for name in names if name.startswith("BENCH")]
    assert "messages_per_second" in shell.run("bench", *arguments, "--messages", "3")


@pytest.mark.long
@each(
    ("arguments", "status"),
    [
        (("stream", "info", "NONE"), 3),
        (("stream", "rm", "NONE", "--yes"), 3),
        (("consumer", "info", "{stream}", "none"), 3),
        (("next", "{stream}", "none"), 3),
        (("sub", "{stream}", "none"), 3),
        (("sub", "NONE"), 3),
        (("pub", "no.stream.captures.this", "x"), 3),
        (("pub", "no.stream.captures.this", "x", "--count", "2"), 3),
        (("stream", "create", "X", "--discard", "never"), 1),
        (("stream", "edit", "{stream}", "--set", "nonsense=1"), 1),
        (("stream", "create", "X", "--subject", "{stream}.a"), 1),
        (("pub", "not..valid", "x"), 1),
        (("stream", "edit", "{stream}", "--set", "nonsense"), 2),
        (("pub", "a", "x", "--count", "0"), 2),
        (("pub", "a", "x", "--count", "2", "--msg-id", "y"), 2),
        (("pub", "a", "x", "--lines"), 2),
        (("pub", "a", "x", "--ack", "perhaps"), 2),
        (("sub", "{stream}", "--start", "soon"), 2),
        (("sub", "{stream}", "--start", "0"), 2),
        (("sub", "{stream}", "c", "--start", "all"), 2),
        (("next", "{stream}", "c", "--batch", "many"), 2),
        (("bench", "pub", "--mode", "fast"), 2),
    ],
)
def test_status_says_whether_it_was_refused_missing_or_misused(
    shell: Shell, arguments: tuple[str, ...], status: int
) -> None:
    result = shell.try_(*(each.format(stream=shell.stream) for each in arguments))
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_bad_token_is_refused_and_a_good_one_is_read_from_the_file(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    with ServerProcess(tmp_path / "data", token="secret") as server:
        config.write_text(f'[client]\nurl = "{server.url}"\ntoken = "secret"\n')
        shell = Shell(server.url, "S")
        assert shell.try_("stream", "ls").exit_code == 1
        assert shell.try_("sub", "S").exit_code == 1
        assert shell.run("stream", "ls", "--config", str(config), "--json") == ""


def test_reader_that_leaves_ends_it_quietly(shell: Shell) -> None:
    shell.fill(500)
    with shell.process("sub", shell.stream, "--start", "all", "--json") as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["seq"] == 1
        running.stdout.close()
        assert b"Traceback" not in running.stderr.read()
        assert running.wait(TIMEOUT_S) == 1


def wait_acknowledged(shell: Shell, consumer: str) -> None:
    """Until a consumer has something to do no longer."""
    while True:
        [info] = shell.json("consumer", "info", shell.stream, consumer)
        if (info["num_pending"], info["num_ack_pending"]) == (0, 0):
            return


@pytest.mark.long
def test_ctrl_c_ends_it_with_130_and_the_consumer_continues_later(shell: Shell) -> None:
    shell.run("consumer", "create", shell.stream, "c", "--ack-wait", "1h")
    for number in (1, 2):
        with shell.process("sub", shell.stream, "c", "--raw") as running:
            assert running.stdout is not None
            assert running.stderr is not None
            shell.run("pub", f"{shell.stream}.a", str(number))
            assert running.stdout.readline() == f"{number}\n".encode()
            wait_acknowledged(shell, "c")
            running.send_signal(signal.SIGINT)
            assert running.wait(TIMEOUT_S) == 130
            assert b"Traceback" not in running.stderr.read()


def test_names_are_completed(shell: Shell) -> None:
    shell.run("consumer", "create", shell.stream, "worker")

    def completed(line: str) -> list[str]:
        env = {**shell.env, "_CONTRAIL_COMPLETE": "complete_bash", "COMP_WORDS": line}
        env["COMP_CWORD"] = str(len(line.split(" ")) - 1)
        return run_contrail(env=env).stdout.split()

    assert shell.stream in completed(f"contrail stream info {shell.stream[:1]}")
    assert completed(f"contrail next {shell.stream} wor") == ["worker"]
    assert completed("contrail next NONE wor") == []


@pytest.mark.long
def test_streams_with_shards_are_made_read_and_purged(shell: Shell) -> None:
    name = shell.stream
    shell.run("stream", "rm", name, "--yes")
    shell.run(
        "stream", "create", name, "--subject", f"{name}.>", "--shards", "3", "--shard-by", "2"
    )
    config = shell.json("stream", "info", name)[0]["config"]
    assert (config["shards"], config["shard_by"]) == (3, [2])
    acks = [shell.json("pub", f"{name}.{key}", key)[0] for key in "abcdef"]
    shard, seq = str(acks[0]["shard"]), str(acks[0]["seq"])
    assert shell.json("stream", "get", name, seq, "--shard", shard)[0]["data"] == "a"
    assert shell.try_("stream", "get", name, seq).exit_code != 0
    assert {one["data"] for one in shell.json("stream", "last", name)} == set("abcdef")
    assert sorted(one["data"] for one in shell.json("replay", name)) == list("abcdef")
    own = [one["data"] for one in shell.json("replay", name, "--shard", shard)]
    assert own == [
        key for key, ack in zip("abcdef", acks, strict=True) if ack["shard"] == int(shard)
    ]
    shell.run("stream", "delete-message", name, seq, "--shard", shard, "--yes")
    assert shell.json("stream", "purge", name, "--shard", shard, "--yes") == [
        {"purged": len(own) - 1}
    ]


def test_sdk_reads_all_shards_along_cursors(shell: Shell) -> None:
    with Contrail(shell.url) as client:
        client.delete_stream(shell.stream)
        client.ensure_stream(shell.stream, {"subjects": [f"{shell.stream}.>"], "shards": 4})
        messages = [Message(f"{shell.stream}.{at % 7}", str(at)) for at in range(30)]
        client.publish_batch(shell.stream, messages).raise_refused()
        found, cursor = [], None
        while True:
            page = client.read_range(shell.stream, limit=4, from_seq=cursor)
            if not page.messages:
                break
            found += page.messages
            cursor = page.cursor
        assert sorted(int(one.payload) for one in found) == list(range(30))
        waited = client.read_range(shell.stream, from_seq=cursor, wait="1ms")
        assert (waited.messages, waited.cursor) == ((), cursor)
        last = found[-1]
        assert client.get_message(shell.stream, last.seq, shard=last.shard) == last
        assert list(client.list_deleted(shell.stream, shard=last.shard)) == []
