"""The `contrail` command, run in the process of a test."""

from collections.abc import Mapping
from typing import Any, Final

import pytest
import typer.main
from typer.testing import CliRunner, Result

from contrail_client.cli.main import app

ROOT: Final[Any] = typer.main.get_command(app)
"""The tree of commands. Typer would build it for each call, which takes longer than most calls."""


def run_contrail(
    *arguments: str,
    env: Mapping[str, str | None],
    stdin: bytes | None = None,
) -> Result:
    """Run the command with changes to the environment; return its output and exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", lambda _: ROOT)
        return CliRunner().invoke(app, arguments, input=stdin, env=env, prog_name="contrail")
