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


PEERS = "n1=10.0.0.1:7431,n2=[::1]:7432,n3=10.0.0.3:7433"


def test_peers_name_all_nodes_and_this_one() -> None:
    cluster = StorageSettings.of(SECRET | {"peers": PEERS, "node": "n2"}).cluster
    assert cluster is not None
    assert (cluster.name, cluster.port, cluster.names) == ("n2", 7432, ("n1", "n2", "n3"))
    assert cluster.addresses["n2"] == "[::1]:7432"
    other = StorageSettings.of(SECRET | {"peers": PEERS, "node": "n2", "peer_port": 9}).cluster
    assert other is not None and other.port == 9  # noqa: PT018
    assert StorageSettings.of(SECRET).cluster is None


def test_node_of_a_cluster_accepts_no_loss() -> None:
    given = {"peers": PEERS, "accept_data_loss": True}
    with pytest.raises(SettingsError, match="accept_data_loss repairs a node that is alone"):
        StorageSettings.of(SECRET | given)


@pytest.mark.parametrize(
    ("peers", "problem"),
    [
        ("n1=h:1,n2=h:2", "peers must name 3 or 5 nodes, this one included, not 2"),
        ("n1=h:1,n2=h:2,n3=h:3,n4=h:4", "3 or 5 nodes, this one included, not 4"),
        ("n1=h:1,n2=h:2,n2=h:3", "peers names n2 twice"),
        ("n1=h:1,n2=h:2,h:3", "'h:3' is not a peer such as n1=127.0.0.1:7431"),
        ("n1=h:1,n2=h:2,n3=h", "'h' is not an address"),
        ("n1=h:1,n2=h:2,n3=h:0", "the port of 'h:0' must be between"),
        ("n1=h:1,n2=h:2,n 3=h:3", "'n 3' is not a valid node name"),
        ("n2=h:1,n3=h:2,n4=h:3", r"peers must name this node too, and n1 \(--node\) is not in it"),
    ],
)
def test_peers_that_make_no_cluster_are_refused(peers: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        StorageSettings.of(SECRET | {"peers": peers})


@each("service", Service)
def test_command_line_declares_the_settings_of_the_server(service: Service) -> None:
    settings, declared = SERVICES[service].settings, DEFAULTS[service]
    required = {name: value for name, value in SECRET.items() if name in declared}
    assert settings({**declared, **required}) == settings(required)
    for name in KNOWN - declared.keys():
        with pytest.raises(SettingsError, match=f"unknown setting: {name}"):
            settings({**required, name: None})
