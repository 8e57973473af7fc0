"""Commands on time, on the node's life and on clients that go away."""

from tests.scenarios.arguments import ArgumentError, Arguments
from tests.scenarios.world import World


async def advance(world: World, arguments: Arguments) -> list[str]:
    """Let time pass: ``advance D``."""
    duration_ns = arguments.duration_ns("duration")
    arguments.end()
    if duration_ns <= 0:
        raise ArgumentError("time goes forward only")
    await world.advance(duration_ns)
    return []


async def step_wall_clock(world: World, arguments: Arguments) -> list[str]:
    """Set the wall clock forth, or with a negative step back: ``step_wall_clock D``."""
    step_ns = arguments.duration_ns("step")
    arguments.end()
    world.clock.wall_step_ns += step_ns
    return []


async def restart(world: World, arguments: Arguments) -> list[str]:
    """Stop the node cleanly and start it again: ``restart [down=D]``."""
    return await _restart(world, arguments, killed=False)


async def kill(world: World, arguments: Arguments) -> list[str]:
    """End the node, and start one over what its files held at that moment: ``kill [down=D]``."""
    return await _restart(world, arguments, killed=True)


async def _restart(world: World, arguments: Arguments, *, killed: bool) -> list[str]:
    down_ns = arguments.duration_option_ns("down")
    arguments.end()
    await world.restart(down_ns, killed=killed)
    return []


async def cancel(world: World, arguments: Arguments) -> list[str]:
    """Let the client of a pull that waits go away: ``cancel N``."""
    number = arguments.integer("pull")
    arguments.end()
    if number not in world.waiting:
        raise ArgumentError(f"pull {number} does not wait")
    await world.cancel_pulls(number)
    return []
