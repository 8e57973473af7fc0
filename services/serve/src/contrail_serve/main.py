"""The server commands: each takes settings and returns an exit status."""

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from contrail_serve.allocator import keep_freed_memory
from contrail_serve.logs import configure_logs
from contrail_serve.long_lived import short_collections
from contrail_serve.process import StartError, StoppedEarlyError, signals_kept
from contrail_serve.settings import (
    EdgeProcessSettings,
    ProcessSettings,
    ServeSettings,
    SettingsError,
    StorageSettings,
)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2


@dataclass(frozen=True, slots=True)
class Service:
    """A server command: its settings, and the module and coroutine function that serve.

    The module is imported when it is needed: an edge process does not need the storage node.
    """

    settings: Callable[[Mapping[str, Any]], ProcessSettings]
    module: str
    function: str


SERVICES: Final[Mapping[str, Service]] = {
    "serve": Service(ServeSettings.of, "contrail_serve.node_process", "serve"),
    "storage": Service(StorageSettings.of, "contrail_serve.node_process", "serve_storage"),
    "api": Service(EdgeProcessSettings.of_api, "contrail_serve.edge_process", "serve_api"),
    "gateway": Service(
        EdgeProcessSettings.of_gateway, "contrail_serve.edge_process", "serve_gateway"
    ),
}


def main(values: Mapping[str, Any], service: str = "serve") -> int:
    """Run ``service`` until SIGTERM or SIGINT; return the exit status.

    0 means a clean end, 1 a failure, 2 an invalid setting.
    """
    with signals_kept():
        return _run(SERVICES[service], service, values)


def _run(chosen: Service, name: str, values: Mapping[str, Any]) -> int:
    try:
        settings = chosen.settings(values)
    except SettingsError as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    # Before anything large is allocated.
    keep_freed_memory()
    configure_logs(settings.log_level, settings.log_format, service=name, node=settings.node)
    serve = getattr(importlib.import_module(chosen.module), chosen.function)
    try:
        with short_collections():
            return EXIT_OK if uvloop.run(serve(settings)) else EXIT_FAILED
    except StoppedEarlyError as stopped:
        print(f"contrail: {stopped}", file=sys.stderr)
        return EXIT_OK
    except (StartError, OSError) as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_FAILED
