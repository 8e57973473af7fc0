"""A server whose time hardly passes: a replay must not depend on when a timer fires.

A recorded test may wait for the end of a time to live; a replay has the same waits as briefly as
may be. Whether a message is still there would depend on the load of the machine.
"""

import runpy
import time
from typing import Final

from contrail_storage.consumers.inactive import InactiveConsumers
from contrail_storage.replica.log_time import Clocks

SLOWNESS: Final = 1_000
"""A replay takes some seconds, and the shortest time to live is one."""


def slow_down() -> None:
    """Slow the log time of this process, and keep consumers that nobody uses."""
    wall_ns, boot_ns = time.time_ns(), Clocks().boot_ns()
    read_ns = Clocks.boot_ns

    def passed_ns(clocks: Clocks) -> int:
        return (read_ns(clocks) - boot_ns) // SLOWNESS

    async def drop_none(consumers: InactiveConsumers) -> None:
        """Their time is that of the event loop."""

    setattr(Clocks, "wall_ns", lambda clocks: wall_ns + passed_ns(clocks))  # noqa: B010
    setattr(Clocks, "boot_ns", lambda clocks: boot_ns + passed_ns(clocks))  # noqa: B010
    setattr(InactiveConsumers, "drop", drop_none)  # noqa: B010


if __name__ == "__main__":
    slow_down()
    runpy.run_module("contrail_serve", run_name="__main__", alter_sys=True)
