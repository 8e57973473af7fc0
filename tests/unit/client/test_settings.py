"""Settings of the server: which source wins, and what cannot be read."""

import re
from pathlib import Path

import pytest

from contrail_client.cli.settings import (
    DECLARED,
    DEFAULTS,
    FLAGS,
    SECRET,
    Service,
    Setting,
    SettingError,
    read_settings,
)
from tests.checks.repository import ROOT
from tests.support.each import each


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "contrail.toml"
    path.write_text('port = 1111\nhost = "10.0.0.1"\nallowed_hosts = ["a.example"]\n')
    return path


def test_defaults_are_named_as_such() -> None:
    settings = read_settings({}, {}, None)
    assert settings["port"] == Setting(7420, "default")
    assert settings.keys() == DEFAULTS["serve"].keys()


@each(("service", "port"), [("storage", 7422), ("api", 7420), ("gateway", 7421)])
def test_each_service_has_settings_of_its_own(service: str, port: int) -> None:
    environ = {"CONTRAIL_CLUSTER_SECRET": "s", "CONTRAIL_STORAGE": "a:1, b:2"}
    settings = read_settings({}, environ, None, service)
    assert settings["port"] == Setting(port, "default")
    assert settings["cluster_secret"] == Setting("s", "CONTRAIL_CLUSTER_SECRET")
    assert ("data_dir" in settings) is (service == "storage")
    if service != "storage":
        assert settings["storage"] == Setting(("a:1", "b:2"), "CONTRAIL_STORAGE")


def test_each_service_declares_a_setting_once() -> None:
    for service in Service:
        names = [each.name for each in DECLARED if service in each.services]
        assert len(names) == len(set(names))
        assert FLAGS[service] <= set(names) - SECRET


# The page gives the defaults of these in words.
IN_WORDS = {
    *("allowed_hosts", "allowed_origins", "max_payload", "memory_max_bytes"),
    *("cache_max_bytes", "peers", "peer_port", "link_port", "log_tail_bytes"),
}


def documented(names: str, defaults: str) -> list[tuple[str, str]]:
    """Each setting of a row with its default; one default may stand for all."""
    each_name, each_default = names.split(", "), defaults.split(", ")
    each_default *= len(each_name) // len(each_default)
    pairs = zip(each_name, each_default, strict=True)
    return [(name.strip("`"), default.strip("`")) for name, default in pairs]


def test_documented_settings_are_those_of_serve() -> None:
    text = (ROOT / "docs/running.md").read_text()
    section = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", section, re.MULTILINE)
    shown = {name: default for row in rows for name, default in documented(*row)}
    assert shown.keys() == DEFAULTS["serve"].keys()
    for setting in DECLARED:
        if Service.SERVE in setting.services and setting.name not in IN_WORDS:
            default = setting.default
            assert shown[setting.name] == ("none" if default is None else str(default).lower())
    [without_flag] = re.findall(r"The settings ([^.]+?) have no flag", section)
    assert set(re.findall(r"`(\w+)`", without_flag)) == DEFAULTS["serve"].keys() - FLAGS["serve"]


def test_list_in_a_flag_is_separated_by_commas() -> None:
    settings = read_settings({"apis": "a:1,b:2"}, {}, None, "gateway")
    assert settings["apis"] == Setting(("a:1", "b:2"), "flag")


def test_services_may_share_one_file(tmp_path: Path) -> None:
    path = tmp_path / "contrail.toml"
    path.write_text('storage = ["a:1"]\nlink_port = 1\ngateways = ["b:2"]\n')
    assert read_settings({}, {}, path, "api")["gateways"].value == ["b:2"]
    assert "storage" not in read_settings({}, {}, path, "serve")


def test_flag_beats_variable_beats_file_beats_default(config: Path) -> None:
    environ = {"CONTRAIL_PORT": "2222", "CONTRAIL_HOST": "10.0.0.2"}
    settings = read_settings({"port": "3333", "host": None}, environ, config)
    assert settings["port"] == Setting("3333", "flag")
    assert settings["host"] == Setting("10.0.0.2", "CONTRAIL_HOST")
    assert settings["allowed_hosts"] == Setting(["a.example"], str(config))
    assert settings["log_level"] == Setting("info", "default")


def test_list_in_a_variable_is_separated_by_commas() -> None:
    settings = read_settings({}, {"CONTRAIL_ALLOWED_HOSTS": "a.example, b.example,"}, None)
    assert settings["allowed_hosts"].value == ("a.example", "b.example")


def test_unknown_setting_in_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contrail.toml"
    path.write_text("prot = 1\n")
    with pytest.raises(SettingError, match="unknown setting 'prot'"):
        read_settings({}, {}, path)


@pytest.mark.parametrize("content", [b"port = \n", b"\xff\xfe", None])
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "contrail.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingError, match=r"contrail\.toml"):
        read_settings({}, {}, path)
