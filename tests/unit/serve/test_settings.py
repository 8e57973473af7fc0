"""Settings of a server that name files."""

from pathlib import Path

import pytest

from contrail_serve.settings import SettingsError, StorageSettings

SECRET = {"cluster_secret": "the cluster secret of a test"}


@pytest.mark.parametrize(
    "name", ["token_file", "cluster_secret_file", "encryption_key_file", "data_dir"]
)
@pytest.mark.parametrize("given", ["", " "])
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
