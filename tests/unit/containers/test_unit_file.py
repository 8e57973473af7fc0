"""The systemd unit: what it starts is started here, and systemd reads it where there is one."""

import configparser
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contrail_serve.main import EXIT_SETTINGS
from tests.checks.repository import ROOT
from tests.support.servers import STOP_S

UNIT = ROOT / "deploy" / "contrail.service"
PROGRAM = "/usr/local/bin/contrail"


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    """The unit by section; every setting is given once."""
    parser = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(UNIT.read_text())
    return parser


@pytest.mark.long
def test_its_command_serves_with_the_token_and_stops_on_sigterm(
    unit: configparser.ConfigParser, tmp_path: Path
) -> None:
    credential, _, _ = unit["Service"]["LoadCredential"].partition(":")
    (tmp_path / credential).write_text("the-token-of-a-test\n")
    (tmp_path / unit["Service"]["StateDirectory"]).mkdir()
    text = unit["Service"]["ExecStart"].replace("%S", str(tmp_path)).replace("%d", str(tmp_path))
    program, *arguments = shlex.split(text)
    assert program == PROGRAM
    command = [sys.executable, "-m", "contrail_client", *arguments]
    environment = {**os.environ, "CONTRAIL_PORT": "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"] is True
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    assert (tmp_path / "contrail" / "wal").is_dir()


def test_a_wrong_setting_is_not_tried_again(unit: configparser.ConfigParser) -> None:
    service = unit["Service"]
    assert (service["Restart"], service["Type"]) == ("on-failure", "exec")
    assert service["RestartPreventExitStatus"] == str(EXIT_SETTINGS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_it(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    answer = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        timeout=STOP_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
