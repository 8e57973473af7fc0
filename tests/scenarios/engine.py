"""Telling a story: its commands, one after the other, to a node of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from contrail_common.errors import ApiError
from tests.scenarios import (
    consumer_commands,
    reading_commands,
    showing,
    stream_commands,
    world_commands,
)
from tests.scenarios.arguments import ArgumentError, Arguments, split_words
from tests.scenarios.clock import StoryLoop
from tests.scenarios.parser import Scenario, ScenarioError, Step
from tests.scenarios.world import StuckError, World, opened

Command = Callable[[World, Arguments], Awaitable[list[str]]]

COMMANDS: Final[dict[str, Command]] = {
    "stream create": stream_commands.create_stream,
    "stream update": stream_commands.update_stream,
    "stream delete": stream_commands.delete_stream,
    "stream info": stream_commands.stream_info,
    "stream purge": stream_commands.purge_stream,
    "publish": stream_commands.publish,
    "get": reading_commands.get_message,
    "delete": stream_commands.delete_message,
    "erase": stream_commands.erase,
    "messages": reading_commands.messages,
    "last": reading_commands.last,
    "subjects": reading_commands.subjects,
    "replay plan": reading_commands.plan,
    "replay": reading_commands.replay,
    "consumer create": consumer_commands.create_consumer,
    "consumer update": consumer_commands.update_consumer,
    "consumer delete": consumer_commands.delete_consumer,
    "consumer info": consumer_commands.consumer_info,
    "consumer pending": consumer_commands.consumer_pending,
    "pull": consumer_commands.pull,
    "ack": consumer_commands.ack,
    "nak": consumer_commands.nak,
    "term": consumer_commands.term,
    "in_progress": consumer_commands.in_progress,
    "cancel": world_commands.cancel,
    "advance": world_commands.advance,
    "step_wall_clock": world_commands.step_wall_clock,
    "restart": world_commands.restart,
    "kill": world_commands.kill,
}


def tell(scenario: Scenario, root: Path) -> list[list[str]]:
    """The output of each step, over a node that keeps its data below ``root``.

    Raises ScenarioError for a command that is unknown or wrongly used.
    """
    with asyncio.Runner(loop_factory=StoryLoop) as runner:
        return runner.run(_tell(scenario, root))


async def _tell(scenario: Scenario, root: Path) -> list[list[str]]:
    async with opened(root) as world:
        return [await _output(world, scenario.path, step) for step in scenario.steps]


async def _output(world: World, path: Path, step: Step) -> list[str]:
    try:
        lines = await _run(world, step.command)
    except (ArgumentError, StuckError) as error:
        raise ScenarioError(path, step.line, str(error)) from error
    for pull in world.take_ended():
        lines += showing.ended_pull(pull)
    return lines


async def _run(world: World, command: str) -> list[str]:
    name = command_of(command)
    arguments = Arguments(split_words(command)[len(name.split()) :])
    try:
        return await COMMANDS[name](world, arguments)
    except ApiError as error:
        return [showing.refused(error)]


def command_of(text: str) -> str:
    """The name of the command that ``text`` begins with; ArgumentError when there is none."""
    words = split_words(text)
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name
    raise ArgumentError(f"there is no command {words[0]!r}, only {', '.join(COMMANDS)}")
