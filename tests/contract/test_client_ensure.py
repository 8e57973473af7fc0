"""Creating, ensuring and replacing: what exists is changed by name only."""

import warnings

import pytest

from contrail_client import (
    AsyncContrail,
    ConfigDiffers,
    Conflict,
    Contrail,
    Difference,
    StreamConfig,
)
from tests.contract.client_rig import finish, new_stream
from tests.contract.test_client_cli import Shell
from tests.support.servers import ServerProcess


@pytest.fixture
def stream(live: ServerProcess) -> str:
    """A stream whose messages expire after a week, with five messages and a consumer."""
    name = new_stream(live.url, max_age="7d")
    with Contrail(live.url) as client:
        for number in range(5):
            client.publish(f"{name}.a", str(number))
        client.create_consumer(name, "c", {"filter_subject": f"{name}.a", "ack_wait": "9s"})
    return name


def test_create_finds_what_is_identical_and_names_what_differs(
    live: ServerProcess, stream: str
) -> None:
    with Contrail(live.url) as client:
        same = client.create_stream(stream, {"subjects": [f"{stream}.>"], "max_age": "168h"})
        assert same.config["max_age"] == "7d"
        with pytest.raises(Conflict, match="stream_exists") as refused:
            client.create_stream(stream, {"subjects": [f"{stream}.>"], "max_msgs": 2})
        warned = {each.pointer: each.message for each in refused.value.errors}
        assert warned == {"/max_age": 'is "7d", not "0s"', "/max_msgs": "is -1, not 2"}
        client.create_consumer(stream, "c", {"filter_subject": f"{stream}.a", "ack_wait": "9s"})
        with pytest.raises(Conflict, match="consumer_exists") as refused:
            client.create_consumer(stream, "c", {"filter_subject": f"{stream}.a"})
        assert [each.pointer for each in refused.value.errors] == ["/ack_wait"]
        assert client.get_stream(stream).state.messages == 5


def test_ensure_leaves_what_exists_and_says_what_differs(live: ServerProcess, stream: str) -> None:
    config: StreamConfig = {"subjects": [f"{stream}.>"], "max_msgs": 2}
    expected = (Difference("max_msgs", 2, -1),)
    with Contrail(live.url) as client:
        with pytest.warns(ConfigDiffers, match="max_msgs is -1, not 2") as warned:
            info = client.ensure_stream(stream, config)
        assert warned[0].filename == __file__  # it points at who called
        assert (info.differs, info.config["max_age"]) == (expected, "7d")
        assert info.state.messages == 5
        with pytest.warns(ConfigDiffers, match="ack_wait is '9s', not '1s'"):
            worker = client.ensure_consumer(stream, "c", {"ack_wait": "1s"})
        assert worker.differs == (Difference("ack_wait", "1s", "9s"),)
        assert worker.info().config["filter_subject"] == f"{stream}.a"

    async def work() -> None:
        async with AsyncContrail(live.url) as client:
            with pytest.warns(ConfigDiffers) as warned:
                info = await client.ensure_stream(stream, config)
            assert (info.differs, warned[0].filename) == (expected, __file__)
            with pytest.warns(ConfigDiffers) as warned:
                worker = await client.ensure_consumer(stream, "c", {"ack_wait": "1s"})
            assert (len(worker.differs), warned[0].filename) == (1, __file__)

    finish(work())


def test_ensure_is_silent_about_what_was_not_given(live: ServerProcess, stream: str) -> None:
    with warnings.catch_warnings(), Contrail(live.url) as client:
        warnings.simplefilter("error")
        info = client.ensure_stream(stream, {"subjects": [f"{stream}.>"]})
        assert (info.differs, info.config["max_age"]) == ((), "7d")
        assert client.ensure_consumer(stream, "c").differs == ()
        made = client.ensure_stream(f"{stream}-new", {"subjects": [f"{stream}-new.>"]})
        assert made.differs == ()


def test_put_replaces_all_of_it(live: ServerProcess, stream: str) -> None:
    with Contrail(live.url) as client:
        info = client.put_stream(stream, {"subjects": [f"{stream}.>"], "max_msgs": 2})
        assert (info.config["max_age"], info.state.messages) == ("0s", 2)
        worker = client.put_consumer(stream, "c", {"filter_subject": f"{stream}.a"})
        assert worker.info().config["ack_wait"] == "30s"


def test_command_creates_once_and_replaces_on_request(live: ServerProcess, stream: str) -> None:
    shell = Shell(live.url, stream)
    create = ("stream", "create", stream, "--subject", f"{stream}.>", "--max-msgs", "2")
    refused = shell.try_(*create)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "max_age is" in refused.stderr
    assert "max_msgs is -1, not 2" in refused.stderr
    assert "contrail stream edit" in refused.stderr
    assert "--replace" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert shell.json("stream", "info", stream)[0]["state"]["messages"] == 5
    assert shell.json(*create, "--replace")[0]["state"]["messages"] == 2
    consumer = ("consumer", "create", stream, "c", "--ack-wait", "1s")
    refused = shell.try_(*consumer)
    assert refused.exit_code == 1
    assert "ack_wait is" in refused.stderr
    assert shell.json(*consumer, "--replace")[0]["config"]["ack_wait"] == "1s"
