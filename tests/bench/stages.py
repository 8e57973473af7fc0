"""The stages that a message passes in the server, and what it costs in each of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

OTHER: Final = "other"
SHARED: Final = "shared"
"""Instead of a stage: modules that all stages use. Their costs are those of their callers."""

STAGES: Final = (
    "loop",
    "http",
    "websocket",
    "api",
    "gateway",
    "link",
    "streams",
    "consumers",
    "propose",
    "raft",
    "log",
    "apply",
    "store",
    "read",
    "node",
    OTHER,
)
"""In about the order in which a message reaches them."""

MODULES: Final = {
    "asyncio": "loop",
    "uvloop": "loop",
    "contrail_common": SHARED,
    "contrail_edge": "http",
    "contrail_edge.http": "http",
    "contrail_edge.inputs": "api",
    "contrail_edge.openapi": "api",
    "contrail_edge.ws": "websocket",
    "contrail_api": "api",
    "contrail_gateway": "gateway",
    "contrail_gateway.core": "gateway",
    "contrail_gateway.sockets": "websocket",
    "contrail_link": "link",
    "contrail_replicator": "raft",
    "contrail_serve": "node",
    "contrail_serve.forwarding": "http",
    "contrail_serve.local_cluster": "node",
    "contrail_serve.member_log": "log",
    "contrail_storage": "node",
    "contrail_storage.link": "link",
    "contrail_storage.streams": "streams",
    "contrail_storage.consumers": "consumers",
    "contrail_storage.replica": "propose",
    "contrail_storage.replica.applier": "apply",
    "contrail_storage.replica.apply_pace": "apply",
    "contrail_storage.replica.store_writer": "store",
    "contrail_storage.replica.write_behind": "store",
    "contrail_storage.seal": SHARED,
    "contrail_storage.wal": "log",
    "contrail_storage.disk": "log",
    "contrail_storage.core": "apply",
    "contrail_storage.core.commands": "propose",
    "contrail_storage.core.entry_codec": "propose",
    "contrail_storage.store": "store",
    "contrail_storage.reading": "read",
    "contrail_storage.reading.answering": "link",
    "contrail_storage.repair": "node",
    "contrail_storage.state": "node",
    "contrail_storage.upkeep": "node",
}
"""The stage of a module is that of the longest name here that is its own, or of a package of it."""

_SHOWN: Final = 0.02
"""The part of all CPU or of all calls from which on a stage is shown."""

Function = tuple[str, str]
"""A stage, and the full name of a function."""

Costs = Mapping[Function, float]
"""What functions have cost: calls, or nanoseconds of CPU."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Calls of functions in Python, and CPU in microseconds, both per message."""

    calls: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What each function costs per message."""

    functions: Mapping[Function, Cost]

    @classmethod
    def of(cls, calls: Costs, cpu: Costs, server_us: float) -> "Profile":
        """Join the calls of one run with the CPU of another one, both per message.

        The CPU is scaled, so that its sum is what the server took in the run without a profiler.
        """
        scale = server_us / (sum(cpu.values()) or 1.0)
        return cls(
            {
                function: Cost(calls.get(function, 0.0), cpu.get(function, 0.0) * scale)
                for function in {**cpu, **calls}
            }
        )

    def total(self) -> Cost:
        """The cost of all functions."""
        return _sum(self.functions.values())

    def stages(self) -> dict[str, Cost]:
        """The cost of each stage, in their order; small stages are part of ``other``."""
        total, shown, rest = self.total(), dict[str, Cost](), list[Cost]()
        for name in STAGES:
            cost = _sum(cost for (stage, _), cost in self.functions.items() if stage == name)
            large = cost.cpu_us >= _SHOWN * total.cpu_us or cost.calls >= _SHOWN * total.calls
            if large and name != OTHER:
                shown[name] = cost
            else:
                rest.append(cost)
        return {**shown, OTHER: _sum(rest)}

    def top(self, stage: str, count: int) -> list[tuple[str, Cost]]:
        """The ``count`` functions of a stage that take most CPU, with the costs of each."""
        functions = [(name, cost) for (of, name), cost in self.functions.items() if of == stage]
        functions.sort(key=lambda function: function[1].cpu_us, reverse=True)
        return functions[:count]


def stage_of(module: str) -> str:
    """The stage of a module by its full name; ``other`` if it is no part of the server."""
    while module not in MODULES:
        module, dot, _ = module.rpartition(".")
        if not dot:
            return OTHER
    return MODULES[module]


def _sum(costs: Iterable[Cost]) -> Cost:
    every = list(costs)
    return Cost(sum(cost.calls for cost in every), sum(cost.cpu_us for cost in every))
