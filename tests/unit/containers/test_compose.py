"""docker-compose.yml against the format, against itself, and against the settings it hands over."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from contrail_client.cli.settings import DEFAULTS, ENVIRONMENT_PREFIX, KNOWN, read_settings
from contrail_flights.__main__ import parse_settings
from contrail_serve.main import SERVICES
from contrail_serve.settings import EdgeProcessSettings, ProcessSettings, StorageSettings
from contrail_spark.standalone import MASTER_PORT
from tests.support.each import each
from tests.unit.containers.files import (
    compose,
    health_command,
    here,
    image_environment,
    services,
    texts,
)

SCHEMA = json.loads(Path(__file__).with_name("compose_schema.json").read_text())
SECRETS = "/run/secrets/"
JOBS = {"demo", "job"}
LONG_RUNNING = sorted(set(services()) - JOBS)
COMMANDS = {name: each.get("environment", {}).get("SERVICE") for name, each in services().items()}
PROCESSES = sorted(name for name, command in COMMANDS.items() if command in SERVICES)
NODES = ("storage1", "storage2", "storage3")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """What the containers would find under /run/secrets."""
    for name in compose()["secrets"]:
        (tmp_path / name).write_text("x" * 43)
    return tmp_path


def effective(service: str, secrets: Path) -> ProcessSettings:
    """The settings with which the service's process would start."""
    environment = image_environment() | services()[service]["environment"]
    command = environment.pop("SERVICE")
    found = {
        name: str(value).replace(SECRETS, f"{secrets}/") for name, value in environment.items()
    }
    values = {name: each.value for name, each in read_settings({}, found, None, command).items()}
    return SERVICES[command].settings(values)


def test_it_is_valid_against_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(compose(), SCHEMA)


@each(
    ("key", "value"),
    [("restart", "sometimes"), ("prots", []), ("stop_grace_period", 60), ("healthcheck", {})],
)
def test_the_schema_refuses_what_is_not_of_the_format(key: str, value: Any) -> None:
    broken = {**compose(), "services": {"api1": {**services()["api1"], key: value}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@each("name", services())
def test_a_container_can_do_no_more_than_it_needs(name: str) -> None:
    service = services()[name]
    assert service["user"] == texts("runtime", "USER")[0]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    # Where no volume is named, /data is the image's own: in memory it would be root's under podman.
    assert [place.partition(":")[0] for place in service["tmpfs"]] == ["/tmp"]
    assert {volume.split(":")[1] for volume in service.get("volumes", [])} <= {"/data"}


@each("name", LONG_RUNNING)
def test_a_service_is_restarted_and_checked_as_its_image_is(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "unless-stopped"
    assert here(service["healthcheck"]["test"][1:]) == health_command(service["build"]["target"])
    [check] = texts(service["build"]["target"], "HEALTHCHECK")
    assert f"--start-period={service['healthcheck']['start_period']}" in check


@each("name", sorted(JOBS))
def test_a_job_runs_once_and_only_when_asked_for(name: str) -> None:
    job = services()[name]
    assert (job["restart"], job["profiles"]) == ("no", [name])
    assert job["healthcheck"] == {"disable": True}
    # The executors read the token at the path that the driver names.
    assert "token" in job["secrets"]


@each("name", services())
def test_what_a_service_refers_to_exists(name: str) -> None:
    service = services()[name]
    assert set(service.get("secrets", [])) <= set(compose()["secrets"])
    volumes = {volume.partition(":")[0] for volume in service.get("volumes", [])}
    assert volumes <= set(compose()["volumes"])
    for other, how in service.get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "test" in services()[other]["healthcheck"]
    target = service["build"]["target"]
    assert service["image"] == {"service": "contrail", "spark": "contrail-spark"}[target]
    assert set(service["networks"]) <= set(compose()["networks"])


def test_what_is_submitted_to_spark_reaches_the_apis_and_no_other_service() -> None:
    reachable = {name for name, each in services().items() if "spark" in each["networks"]}
    assert reachable == {"spark-master", "spark-worker", *JOBS, "api1", "api2"}


@each("name", services())
def test_a_secret_that_is_named_is_handed_over(name: str) -> None:
    service = services()[name]
    words = [*service.get("command", []), *map(str, service.get("environment", {}).values())]
    named = {found for word in words for found in re.findall(rf"{SECRETS}(\w+)", word)}
    assert named <= set(service.get("secrets", []))


@each("name", services())
def test_every_variable_is_a_setting_of_the_service(name: str) -> None:
    known = DEFAULTS.get(COMMANDS[name], {})
    assert {
        variable
        for variable in services()[name].get("environment", {})
        if variable.startswith(ENVIRONMENT_PREFIX)
    } <= {ENVIRONMENT_PREFIX + setting.upper() for setting in known}


def test_every_variable_of_the_image_is_a_setting() -> None:
    settings = {ENVIRONMENT_PREFIX + setting.upper() for setting in KNOWN}
    assert {name for name in image_environment() if name.startswith("CONTRAIL_")} <= settings


@pytest.mark.parametrize("name", PROCESSES)
def test_the_settings_are_accepted_and_reach_beyond_the_container(name: str, secrets: Path) -> None:
    settings = effective(name, secrets)
    assert settings.host == "0.0.0.0"
    assert settings.token == "x" * 43
    assert name in settings.allowed_hosts


def test_processes_find_each_other_by_name_and_port(secrets: Path) -> None:
    settings = {name: effective(name, secrets) for name in PROCESSES}
    links: list[tuple[str, int]] = []
    for name in NODES:
        node = settings[name]
        assert isinstance(node, StorageSettings)
        assert node.cluster is not None
        assert (node.cluster.name, node.cluster.names) == (name, NODES)
        assert node.cluster.addresses[name] == f"{name}:{node.cluster.port}"
        links.append((name, node.link_port))
    ports = {"api": (7420, "gateway"), "gateway": (7421, "api")}
    for name in ("api1", "api2", "gateway1", "gateway2"):
        edge, (port, other) = settings[name], ports[name[:-1]]
        assert isinstance(edge, EdgeProcessSettings)
        assert edge.port == port
        assert edge.storage == tuple(links)
        assert edge.peers == tuple((f"{other}{at}", ports[other][0]) for at in (1, 2))
        # A forwarded request keeps the Host header that it came with.
        assert {name, f"{other}1", f"{other}2"} <= edge.allowed_hosts
        assert set(services()[name]["depends_on"]) == set(NODES)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_published_port_leads_to_the_one_that_answers(name: str, secrets: Path) -> None:
    [published] = services()[name]["ports"]
    assert published.endswith(f":{effective(name, secrets).port}")


def test_published_ports_differ() -> None:
    published = [
        port.rpartition(":")[0] for one in services().values() for port in one.get("ports", [])
    ]
    assert len(set(published)) == len(published)


def test_the_demonstration_is_given_the_server_the_token_and_the_cluster() -> None:
    demo = parse_settings(services()["demo"]["command"])
    assert demo.url == "http://api1:7420"
    master = f"spark://{services()['spark-master']['hostname']}:{MASTER_PORT}"
    assert demo.spark_master == services()["spark-worker"]["command"][0] == master
    # The executors read the token at the path that the driver names.
    assert str(demo.token_file) == f"{SECRETS}token"
    assert "token" in services()["spark-worker"]["secrets"]
