"""Settings of a server: those that name files, and that the command line declares the same ones."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from contrail_client.cli.settings import DEFAULTS, KNOWN, Service
from contrail_serve.cluster_secret import ClusterSecret
from contrail_serve.main import SERVICES
from contrail_serve.settings import (
    CertificateSettings,
    SecretSettings,
    ServeSettings,
    SettingsError,
    StorageSettings,
)
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


def test_whole_node_of_a_cluster_listens_where_the_others_reach_it() -> None:
    given = SECRET | {"peers": PEERS, "node": "n2"}
    settings = ServeSettings.of(given)
    assert settings.cluster is not None
    assert (settings.cluster.host, settings.cluster.port, settings.link_port) == ("::1", 7432, 0)
    anywhere = ServeSettings.of(given | {"host": "0.0.0.0", "token": "t"})
    assert anywhere.cluster is not None
    assert anywhere.cluster.host == "0.0.0.0"
    assert ServeSettings.of({}).cluster is None
    with pytest.raises(SettingsError, match="a cluster secret is required"):
        ServeSettings.of({"peers": PEERS})


@each("given", [SECRET, {"cluster_secret_file": "f"}, {"peer_port": 7431}, {"link_port": 7430}])
def test_settings_of_a_cluster_need_its_peers(given: dict[str, object]) -> None:
    [name] = given
    with pytest.raises(SettingsError, match=f"{name} is for a node of a cluster: also name all"):
        ServeSettings.of(given)
    if name == "peer_port":
        with pytest.raises(SettingsError, match=name):
            StorageSettings.of(SECRET | given)


def test_certificates_are_given_together() -> None:
    files = {"peer_cert": "c", "peer_key": "k", "peer_ca": "a"}
    given = SECRET | {"peers": PEERS}
    cluster = ServeSettings.of(given | files).cluster
    assert cluster is not None
    assert cluster.certificates == CertificateSettings(Path("c"), Path("k"), Path("a"))
    for name in files:
        some = {other: path for other, path in files.items() if other != name}
        with pytest.raises(SettingsError, match=f"go together; {name} is missing"):
            ServeSettings.of(given | some)


def test_one_or_two_secrets_are_valid(tmp_path: Path) -> None:
    file, one, two = tmp_path / "secret", "1" * 16, "2" * 16
    file.write_text(f"{two}\n{one}\n")
    settings = StorageSettings.of({"cluster_secret_file": str(file)})
    assert settings.cluster_secret == SecretSettings(values=(two.encode(), one.encode()), file=file)
    for text, problem in (
        ("", "must have at least 16 bytes"),
        (f"{one}\nshort\n", "must have at least 16 bytes"),
        (f"{one}\n{two}\n{one}\n", "has 3 lines: at most 2 are valid at once"),
    ):
        with pytest.raises(SettingsError, match=f"the cluster secret {problem}"):
            StorageSettings.of({"cluster_secret": text})


def test_secret_that_is_read_again_changes_the_keys_that_were_given_out(tmp_path: Path) -> None:
    file, old, new = tmp_path / "secret", "1" * 16, "2" * 16
    file.write_text(old)
    secret = ClusterSecret(StorageSettings.of({"cluster_secret_file": str(file)}).cluster_secret)
    keys = secret.keys("a purpose")
    [before] = keys
    file.write_text(f"{new}\n{old}")
    secret.read_again()
    after, kept = keys
    assert kept == before != after
    file.write_text("short")
    with capture_logs() as logs:
        secret.read_again()
    assert logs[0]["event"] == "cluster_secret_refused"
    assert keys == [after, before]
    assert secret.keys("another") != keys


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
    required = {} if service is Service.SERVE else SECRET
    assert settings({**declared, **required}) == settings(required)
    for name in KNOWN - declared.keys():
        with pytest.raises(SettingsError, match=f"unknown setting: {name}"):
            settings({**required, name: None})


def test_cache_has_at_least_16_mib() -> None:
    assert StorageSettings.of(SECRET | {"cache_max_bytes": 16 << 20}).cache_max_bytes == 16 << 20
    with pytest.raises(SettingsError, match="cache_max_bytes"):
        StorageSettings.of(SECRET | {"cache_max_bytes": (16 << 20) - 1})
