"""The Dockerfile against the tree and the Makefile it builds on."""

import json
import re
from fnmatch import fnmatch

import pytest

from contrail_serve.settings import DEFAULT_PORT, GATEWAY_PORT, LINK_PORT, STORAGE_PORT
from contrail_spark.standalone import MASTER_PORT, MASTER_WEB_PORT, WORKER_WEB_PORT
from tests.checks.repository import ROOT
from tests.unit.containers.files import image_environment, stages, texts

COPIED = [
    (copy.words[:-1], copy.text)
    for stage in stages()
    for copy in stage
    if copy.name == "COPY" and "--from=" not in copy.text
]
SOURCES = [source for sources, _ in COPIED for source in sources]


def included(path: str) -> bool:
    """Whether the build context holds a top-level ``path``: the last rule that matches decides."""
    rules = (ROOT / ".dockerignore").read_text().split("\n")
    verdict = True
    for rule in rules:
        if rule and not rule.startswith("#") and fnmatch(path, rule.removeprefix("!")):
            verdict = rule.startswith("!")
    return verdict


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_copied_exists_and_is_in_the_build_context(source: str) -> None:
    assert (ROOT / source).exists()
    assert included(source.partition("/")[0])


@pytest.mark.parametrize("path", [".git", ".venv", "secrets", "contrail-data", "reports", "tests"])
def test_history_data_and_secrets_stay_out_of_the_build_context(path: str) -> None:
    assert not included(path)


def test_everything_make_install_reads_is_copied() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [members] = re.findall(r"^MEMBERS := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    needed = {member.partition("/")[0] for member in members.replace("\\\n", " ").split()}
    assert {"Makefile", "requirements.lock", *needed} <= set(SOURCES)


def test_the_install_step_is_make_install_itself() -> None:
    installing = [text for text in texts(0, "RUN") if "pip" in text or "make install" in text]
    assert len(installing) == 1
    assert installing[0].endswith(" make install")


def test_both_stages_have_one_python_that_the_makefile_accepts() -> None:
    bases = {stage[0].text.partition(" ")[0] for stage in stages()}
    assert len(bases) == 1, "the environment of the first stage needs its Python in the second"
    [minor] = re.findall(r"^python:3\.(\d+)-slim", bases.pop())
    [low, high] = re.findall(r"\(3, (\d+)\)", (ROOT / "Makefile").read_text())
    assert int(low) <= int(minor) < int(high)


def test_the_environment_is_copied_to_the_path_it_was_made_at() -> None:
    [workdir] = texts(0, "WORKDIR")
    assert f"--from=install {workdir} {workdir}" in texts(1, "COPY")


def test_the_image_runs_as_a_fixed_user_that_owns_its_volume() -> None:
    [user], [volume] = texts(1, "USER"), texts(1, "VOLUME")
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert f"install -d -o {uid} -g {gid} -m 0750 {volume}" in texts(1, "RUN")[0]
    assert image_environment()["CONTRAIL_DATA_DIR"] == volume


def test_the_service_is_told_by_its_own_process_id_to_stop() -> None:
    assert texts(1, "STOPSIGNAL") == ["SIGTERM"]
    [*_, program] = json.loads(texts(1, "ENTRYPOINT")[0])
    script = (ROOT / program.removeprefix("/opt/contrail/")).read_text()
    started = [line for line in script.splitlines() if "python -m" in line]
    assert started
    assert all(line.strip().startswith("exec ") for line in started)


def test_images_of_all_services_share_every_layer() -> None:
    names = [each.name for each in stages()[1]]
    behind = names[names.index("ARG") :]
    assert not {"RUN", "COPY", "ADD"} & set(behind)


def test_every_port_anything_listens_on_is_exposed_and_explained() -> None:
    ports = {DEFAULT_PORT, GATEWAY_PORT, STORAGE_PORT, LINK_PORT}
    ports |= {MASTER_PORT, MASTER_WEB_PORT, WORKER_WEB_PORT}
    assert {int(word) for word in texts(1, "EXPOSE")[0].split()} == ports
    page = (ROOT / "docs" / "running.md").read_text()
    table = page.partition("## Ports")[2].partition("\n## ")[0]
    assert ports <= {int(number) for number in re.findall(r"\d{4}", table)}


def test_no_secret_is_built_into_the_image() -> None:
    named = [*image_environment(), *texts(0, "ARG"), *texts(1, "ARG")]
    assert not [name for name in named if re.search("TOKEN|SECRET|PASSWORD", name)]
