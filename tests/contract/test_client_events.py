"""Events with the SDK and the command: what is heard, across broken connections and restarts."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing, closing, contextmanager, suppress

import pytest
from typer.testing import Result

from contrail_client import AsyncContrail, Contrail, Event
from contrail_client.errors import ContrailError, Invalid
from tests.contract.client_rig import cable_to, finish
from tests.support.command import run_contrail
from tests.support.servers import ServerProcess

TIMEOUT_S = 60.0
PAUSE_S = 0.02


@contextmanager
def changing(url: str, stream: str) -> Iterator[None]:
    """Change a stream again and again, so that who begins to listen hears of it."""
    heard = threading.Event()

    def change() -> None:
        with Contrail(url) as client:
            number = 0
            while not heard.wait(PAUSE_S):
                number = number % 9 + 1
                # If one change fails, the next one is heard: without any, who listens would hang.
                with suppress(ContrailError):
                    client.put_stream(stream, {"subjects": [stream.lower()], "max_msgs": number})

    worker = threading.Thread(target=change)
    worker.start()
    try:
        yield
    finally:
        heard.set()
        worker.join()


def of_consumers(events: Iterator[Event], count: int) -> list[Event]:
    """The next events of consumers; those of streams are passed over."""
    found: list[Event] = []
    while len(found) < count:
        event = next(events)
        if event.type != "stream_action":
            found.append(event)
    return found


# SDK ---------------------------------------------------------------------------------------------
def test_events_of_a_stream_are_heard(live: ServerProcess) -> None:
    with Contrail(live.url) as client, closing(client.events(stream="HEARD")) as events:
        with changing(live.url, "HEARD"):
            assert next(events).stream == "HEARD"
        worker = client.ensure_consumer("HEARD", "worker")
        client.publish("heard", b"x")
        worker.nak(*worker.next(), sync=True)
        worker.term(*worker.next(), reason="broken", sync=True)
        made, nak, term = of_consumers(events, 3)
        assert (made.type, made.consumer, made.action) == ("consumer_action", "worker", "create")
        assert (nak.type, nak.stream_seq, nak.deliveries) == ("nak", 1, 1)
        assert (term.type, term.deliveries, term.reason) == ("terminated", 2, "broken")


def test_selection_of_types_and_consumers_is_the_servers(live: ServerProcess) -> None:
    with Contrail(live.url) as client:
        with pytest.raises(Invalid):
            next(client.events(stream="a.b"))
        with pytest.raises(Invalid):
            next(client.events(types=["explosion"]))  # type: ignore[list-item]


def test_lost_connection_costs_no_event(live: ServerProcess) -> None:
    async def scene() -> None:
        async with (
            cable_to(live.url) as cable,
            AsyncContrail(cable.url) as client,
            aclosing(client.events(stream="CUT")) as events,
        ):
            with changing(live.url, "CUT"):
                await anext(events)
            cable.cut()
            async with AsyncContrail(live.url) as direct:
                await direct.delete_stream("CUT")
                await direct.ensure_stream("CUT", {"subjects": ["cut"]})
                await direct.delete_stream("CUT")
            cable.repair()
            actions = [(await anext(events)).action]
            while actions[-1] == "modify":  # from before the cut
                actions.append((await anext(events)).action)
            actions += [(await anext(events)).action for _ in range(2)]
            assert actions[-3:] == ["delete", "create", "delete"]

    finish(scene())


@pytest.mark.long
def test_restart_of_the_server_is_reported_as_a_loss_and_reading_continues(
    own_server: ServerProcess,
) -> None:
    with Contrail(own_server.url) as client, closing(client.events(stream="S")) as events:
        with changing(own_server.url, "S"):
            assert next(events).type == "stream_action"
        own_server.stop()
        own_server.start()
        client.delete_stream("S")
        with changing(own_server.url, "S"):
            event = next(events)
            while event.type == "stream_action":  # told before the end
                event = next(events)
            assert (event.type, event.count) == ("lost", None)
            assert next(events).stream == "S"


# Command -----------------------------------------------------------------------------------------
def invoke(url: str, *arguments: str) -> Result:
    env = {"CONTRAIL_URL": url, "CONTRAIL_TOKEN": None, "CONTRAIL_CONFIG": None}
    return run_contrail("events", *arguments, env=env)


def test_events_are_printed_for_machines_and_for_people(live: ServerProcess) -> None:
    selection = ["--stream", "SHOWN", "--type", "stream_action", "--type", "nak", "--count", "2"]
    with changing(live.url, "SHOWN"):
        for_machines = invoke(live.url, *selection, "--json")
        for_people = invoke(live.url, *selection)
    assert (for_machines.exit_code, for_people.exit_code) == (0, 0)
    lines = [json.loads(line) for line in for_machines.stdout.splitlines()]
    assert len(lines) == 2
    assert {(line["type"], line["stream"]) for line in lines} == {("stream_action", "SHOWN")}
    assert all("consumer" not in line for line in lines)
    words = for_people.stdout.splitlines()[1].split()
    assert words[1:] == ["stream_action", "SHOWN", "action=modify"]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("--type", "x"), 1), (("--stream", "a.b"), 1), (("--count", "0"), 2), (("--nonsense",), 2)],
)
def test_status_says_whether_it_was_refused_or_misused(
    live: ServerProcess, arguments: tuple[str, ...], status: int
) -> None:
    result = invoke(live.url, *arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_ctrl_c_ends_it_with_130(live: ServerProcess) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CONTRAIL_")}
    with (
        changing(live.url, "STOP"),
        subprocess.Popen(
            [sys.executable, "-m", "contrail_client", "events", "--stream", "STOP", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environ, "CONTRAIL_URL": live.url},
        ) as running,
    ):
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["stream"] == "STOP"
        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_S) == 130
        assert b"Traceback" not in running.stderr.read()


def test_streams_consumers_and_types_are_completed(live: ServerProcess) -> None:
    with Contrail(live.url) as client:
        client.ensure_stream("COMPLETED", {"subjects": ["completed"]})
        client.ensure_consumer("COMPLETED", "worker")

    def completed(line: str) -> list[str]:
        env = {"CONTRAIL_URL": live.url, "_CONTRAIL_COMPLETE": "complete_bash", "COMP_WORDS": line}
        env["COMP_CWORD"] = str(len(line.split(" ")) - 1)
        return run_contrail(env=env).stdout.split()

    assert completed("contrail events --stream COMP") == ["COMPLETED"]
    assert completed("contrail events --stream COMPLETED --consumer w") == ["worker"]
    assert completed("contrail events --type ma") == ["max_deliver"]
