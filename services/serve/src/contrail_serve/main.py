"""The server commands: settings in, exit status out."""

import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import uvloop

from contrail_serve.edge_process import API, GATEWAY, serve_edge
from contrail_serve.logs import configure_logs
from contrail_serve.node_process import serve, serve_storage
from contrail_serve.process import StartError
from contrail_serve.settings import (
    EdgeProcessSettings,
    ProcessSettings,
    ServeSettings,
    SettingsError,
    StorageSettings,
)
from contrail_storage.node.checkpointer import DataLostError

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2

Start = Callable[[], Coroutine[Any, Any, bool]]


def _serve(values: Mapping[str, Any]) -> tuple[ProcessSettings, Start]:
    settings = ServeSettings.of(values)
    return settings, lambda: serve(settings)


def _storage(values: Mapping[str, Any]) -> tuple[ProcessSettings, Start]:
    settings = StorageSettings.of(values)
    return settings, lambda: serve_storage(settings)


def _api(values: Mapping[str, Any]) -> tuple[ProcessSettings, Start]:
    settings = EdgeProcessSettings.of_api(values)
    return settings, lambda: serve_edge(settings, API)


def _gateway(values: Mapping[str, Any]) -> tuple[ProcessSettings, Start]:
    settings = EdgeProcessSettings.of_gateway(values)
    return settings, lambda: serve_edge(settings, GATEWAY)


SERVICES: Final = {"serve": _serve, "storage": _storage, "api": _api, "gateway": _gateway}
"""What each command starts, by its name."""


def main(values: Mapping[str, Any], service: str = "serve") -> int:
    """Run ``service`` until SIGTERM or SIGINT; answers the exit status.

    0 is a clean end, 1 a failure, 2 a bad setting.
    """
    try:
        settings, start = SERVICES[service](values)
    except SettingsError as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_SETTINGS
    configure_logs(settings.log_level, settings.log_format)
    try:
        return EXIT_OK if uvloop.run(start()) else EXIT_FAILED
    except (StartError, DataLostError, OSError) as error:
        print(f"contrail: {error}", file=sys.stderr)
        return EXIT_FAILED
