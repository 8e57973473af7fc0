"""Settings of a server: those that name files, and that the command line declares the same ones."""

from pathlib import Path

import pytest

from contrail_client.cli.settings import DEFAULTS, KNOWN, Service
from contrail_serve.main import SERVICES
from contrail_serve.settings import SettingsError, StorageSettings
from tests.support.each import each

SECRET = {"cluster_secret": "the cluster secret of a test"}


@each("name", ["token_file", "cluster_secret_file", "encryption_key_file", "data_dir"])
@each("given", ["", " "])
def test_empty_path_is_refused_by_the_name_of_its_setting(name: str, given: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} is empty: give a path"):
        StorageSettings.of(SECRET | {name: given})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("token_file", "token file"),
        ("cluster_secret_file", "cluster secret file"),
        ("encryption_key_file", "encryption key file"),
    ],
)
def test_folder_in_the_place_of_a_file_is_called_one(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(SettingsError, match=rf"the {what} cannot be read: {tmp_path} is a folder"):
        StorageSettings.of(SECRET | {name: str(tmp_path)})


@each("service", Service)
def test_command_line_declares_the_settings_of_the_server(service: Service) -> None:
    settings, declared = SERVICES[service].settings, DEFAULTS[service]
    required = {name: value for name, value in SECRET.items() if name in declared}
    assert settings({**declared, **required}) == settings(required)
    for name in KNOWN - declared.keys():
        with pytest.raises(SettingsError, match=f"unknown setting: {name}"):
            settings({**required, name: None})
