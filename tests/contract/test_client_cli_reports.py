"""Reports, searches, copies, checks and contexts of the `contrail` command."""

import json
import threading
from pathlib import Path

import pytest

from contrail_client import Contrail, Message
from tests.contract.client_rig import new_stream
from tests.contract.test_client_cli import Shell
from tests.support.servers import ServerProcess


@pytest.fixture
def shell(live: ServerProcess, tmp_path: Path) -> Shell:
    """The command with a stream of its own, and a user who has saved nothing yet."""
    made = Shell(live.url, new_stream(live.url))
    made.env["XDG_CONFIG_HOME"] = str(tmp_path)
    return made


def test_streams_are_compared_and_found(shell: Shell) -> None:
    shell.fill(30)
    [found] = [
        each for each in shell.json("stream", "report") if each["config"]["name"] == shell.stream
    ]
    assert found["state"]["messages"] == 30
    table = shell.run("stream", "report", "--sort", "messages", "--subject", f"{shell.stream}.0")
    assert shell.stream in table
    assert "1 stream " in table
    only = ("stream", "find", "--subject", f"{shell.stream}.0")
    assert shell.run(*only, "--min-messages", "30", "--unused").split() == [shell.stream]
    for unmatched in (("--empty",), ("--min-messages", "31"), ("--idle", "1d"), ("--older", "1d")):
        assert shell.run(*only, *unmatched) == ""
        assert shell.run(*only, *unmatched, "--invert").split() == [shell.stream]
    assert shell.try_("stream", "find", "--idle", "soon").exit_code == 2


def test_consumers_are_compared_and_found(shell: Shell) -> None:
    shell.fill(30)
    for name, token in (("all", ">"), ("some", "1")):
        subject = f"{shell.stream}.{token}"
        shell.run("consumer", "create", shell.stream, name, "--filter", subject)
    shell.run("next", shell.stream, "all", "--batch", "3", "--no-ack")
    first, second = shell.json("consumer", "report", shell.stream, "--sort", "pending")
    assert [(each["name"], each["num_pending"]) for each in (first, second)] == [
        ("all", 27),
        ("some", 10),
    ]
    table = shell.run("consumer", "report", shell.stream)
    assert "3 of 1,000" in table
    assert "90%" in table
    find = ("consumer", "find", shell.stream)
    assert shell.run(*find, "--pending", "11").split() == ["all"]
    assert shell.run(*find, "--ack-pending", "1", "--invert").split() == ["some"]
    assert shell.run(*find, "--waiting") == shell.run(*find, "--bound") == ""


def test_copies_take_the_configuration_but_no_messages(shell: Shell) -> None:
    shell.fill(3)
    shell.run("stream", "edit", shell.stream, "--max-age", "7d")
    copy = f"{shell.stream}_COPY"
    refused = shell.try_("stream", "copy", shell.stream, copy)
    assert refused.exit_code == 1
    assert "overlap" in refused.stderr
    [made] = shell.json("stream", "copy", shell.stream, copy, "--subject", f"{copy}.>")
    assert (made["config"]["max_age"], made["state"]["messages"]) == ("7d", 0)
    shell.run("consumer", "create", shell.stream, "a", "--filter", f"{shell.stream}.1")
    [same] = shell.json("consumer", "copy", shell.stream, "a", "b", "--set", "max_deliver=4")
    assert same["config"]["filter_subject"] == f"{shell.stream}.1"
    assert (same["config"]["name"], same["config"]["max_deliver"]) == ("b", 4)
    [other] = shell.json(
        "consumer", "copy", shell.stream, "a", "c", "--filter", f"{shell.stream}.2"
    )
    assert other["config"]["filter_subjects"] == [f"{shell.stream}.2"]


def test_a_page_is_all_that_is_shown_where_nobody_can_ask_for_more(shell: Shell) -> None:
    shell.fill(9)
    shown = shell.json("stream", "view", shell.stream, "--page", "2", "--from", "4")
    assert [each["seq"] for each in shown] == [4, 5]


@pytest.mark.long
def test_checks_end_with_the_status_of_what_they_found(shell: Shell) -> None:
    shell.fill(5)
    shell.run("consumer", "create", shell.stream, "slow")
    check = ("server", "check")
    for command, status, output in (
        (("connection", "--warn", "60", "--critical", "60"), 0, "OK connection: answers in"),
        (("connection", "--warn", "0"), 1, "WARNING connection"),
        (("connection", "--critical", "0"), 2, "CRITICAL connection"),
        (("stream", shell.stream, "--max-messages", "5", "--max-silence", "1h"), 0, "OK"),
        (("stream", shell.stream, "--max-messages", "4"), 2, "5 messages, more than 4"),
        (("stream", shell.stream, "--min-messages", "6"), 2, "5 messages, fewer than 6"),
        (("stream", shell.stream, "--max-silence", "0s"), 2, "newest "),
        (("stream", "NONE"), 2, "there is no stream NONE"),
        (("consumer", shell.stream, "slow", "--max-pending", "5"), 0, "OK"),
        (("consumer", shell.stream, "slow", "--max-pending", "4"), 2, "5 pending, more than 4"),
        (("consumer", shell.stream, "slow", "--max-silence", "1h"), 2, "no message yet"),
    ):
        result = shell.try_(*check, *command)
        assert (result.exit_code, output in result.stdout) == (status, True), result.output
    answer = shell.try_(*check, "stream", "NONE", "--json")
    assert (json.loads(answer.stdout)["level"], answer.exit_code) == ("CRITICAL", 2)
    shell.env["CONTRAIL_URL"] = "http://127.0.0.1:1"
    assert shell.try_(*check, "connection").exit_code == 2


@pytest.mark.long
def test_connection_with_a_wrong_token_is_critical(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data", token="secret") as server:
        refused = Shell(server.url, "S").try_("server", "check", "connection")
        assert (refused.exit_code, "401" in refused.stdout) == (2, True), refused.output


@pytest.mark.parametrize("shards", [1, 4])
def test_top_shows_what_happens_between_two_looks(shell: Shell, shards: int) -> None:
    stop = threading.Event()
    if shards > 1:
        shell.run("stream", "rm", shell.stream, "--yes")
        subject = f"{shell.stream}.>"
        shell.run("stream", "create", shell.stream, "--subject", subject, "--shards", str(shards))

    def publish() -> None:
        with Contrail(shell.url) as client:
            while not stop.is_set():
                messages = [Message(f"{shell.stream}.{number}", b"x") for number in range(16)]
                client.publish_batch(shell.stream, messages)

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        *_, last = shell.json("top", "--rounds", "3", "--interval", "0.2", "--limit", "1000")
    finally:
        stop.set()
        publishing.join()
    [found] = [each for each in last["streams"] if each["stream"] == shell.stream]
    assert found["stored"] > 0
    assert found["removed"] == 0
    assert shell.stream in shell.run("top", "--rounds", "1", "--limit", "1000")
    assert shell.json("rtt", "--count", "3")[0]["min_ms"] > 0


def test_a_context_names_the_server_and_its_token(shell: Shell, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("a-token")
    url = shell.env.pop("CONTRAIL_URL")
    shell.env["CONTRAIL_URL"] = None
    assert url is not None
    add = ("context", "add", "here", "--server", url, "--token-file", str(token_file), "--select")
    shell.run(*add, "--description", "this one")
    shell.run("context", "add", "away", "--server", "http://127.0.0.1:1")
    saved = {each["name"]: each for each in shell.json("context", "ls")}
    assert saved["here"]["token_file"] == str(token_file)
    assert [each["selected"] for each in (saved["away"], saved["here"])] == [False, True]
    assert shell.stream in shell.run("stream", "ls")
    shell.env["CONTRAIL_CONTEXT"] = "away"
    assert shell.try_("stream", "ls").exit_code == 1
    shell.env["CONTRAIL_URL"] = url  # goes before any context
    assert shell.stream in shell.run("stream", "ls")
    shell.env |= {"CONTRAIL_URL": None, "CONTRAIL_CONTEXT": "none"}
    assert "context none does not exist" in shell.try_("stream", "ls").stderr
    shell.env["CONTRAIL_CONTEXT"] = None
    shell.run("context", "rm", "here")
    assert [each["selected"] for each in shell.json("context", "ls")] == [False]
    assert shell.try_("context", "select", "../here").exit_code == 2


def test_placeholders_are_filled_in_for_each_message(shell: Shell) -> None:
    subject, payload = f"{shell.stream}.{{{{count}}}}", '{"n": {{ count }}, "id": "{{id}}"}'
    more = ("--count", "3", "--sleep", "1ms", "--header", "Number={{count}}")
    shell.run("pub", subject, payload, "--template", *more)
    stored = shell.json("stream", "view", shell.stream)
    assert [each["subject"] for each in stored] == [f"{shell.stream}.{n}" for n in (1, 2, 3)]
    assert [json.loads(each["data"])["n"] for each in stored] == [1, 2, 3]
    assert len({json.loads(each["data"])["id"] for each in stored}) == 3
    assert [each["headers"]["Number"] for each in stored] == [["1"], ["2"], ["3"]]
    unknown = shell.try_("pub", f"{shell.stream}.a", "{{what}}", "--template")
    assert (unknown.exit_code, "{{count}}, {{time}}" in unknown.stderr) == (2, True)
    shell.run("pub", f"{shell.stream}.a", "{{count}}")  # as it is, when nothing else is asked for
    assert shell.json("stream", "view", shell.stream)[-1]["data"] == "{{count}}"


def test_clients_of_a_measurement_share_the_messages(shell: Shell) -> None:
    for mode in ("sync", "async", "batch"):
        command = ("bench", "pub", "--mode", mode, "--clients", "3", "--messages", "20")
        [figures] = shell.json(*command, "--batch", "4")
        assert (figures["what"], figures["messages"]) == (f"publish, {mode}, 3 clients", 20)


def test_status_of_the_cluster_is_shown(shell: Shell) -> None:
    [state] = shell.json("cluster", "status")
    assert state["status"] == "healthy"
    assert "is healthy" in shell.run("cluster", "status")
    away = shell.try_("cluster", "status", "--server", "http://127.0.0.1:9")
    assert away.exit_code == 2
    assert "contrail serve" in away.stderr
