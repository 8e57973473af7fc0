"""The folder of a local cluster: what it keeps, and who may use it."""

import socket
from pathlib import Path

import pytest

from contrail_serve.local_cluster import ControlError, Options, launch, start_process
from contrail_serve.local_cluster.folder import HOST, Control, Folder, FolderError
from tests.support.ports import free_port


def test_ports_and_secret_are_chosen_once(tmp_path: Path) -> None:
    folder, port = Folder(tmp_path), free_port()
    places = folder.places(3, port)
    assert [(one.name, one.service) for one in places] == [
        *((f"n{at}", "storage") for at in (1, 2, 3)),
        *(("api1", "api"), ("api2", "api"), ("gateway1", "gateway"), ("gateway2", "gateway")),
    ]
    ports = [port for one in places for port in (one.port, one.link_port, one.peer_port) if port]
    assert len(set(ports)) == len(ports) == 3 * 3 + 4
    assert places[3].port == port
    secret = folder.secret.read_text()
    assert len(secret) == 64
    assert folder.secret.stat().st_mode & 0o777 == 0o600
    assert Folder(tmp_path).places(3, port) == places
    assert folder.secret.read_text() == secret


def test_port_that_another_program_has_is_chosen_anew(tmp_path: Path) -> None:
    places = Folder(tmp_path).places(3, 0)
    with socket.socket() as other:
        other.bind((HOST, places[0].port))
        other.listen()
        changed = Folder(tmp_path).places(3, 0)
    assert changed[0].port != places[0].port
    assert changed[1:] == places[1:]
    assert changed == Folder(tmp_path).places(3, 0)


def test_folder_has_one_cluster_of_one_size_and_one_launcher(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "new")
    with pytest.raises(ControlError, match="no cluster runs in"):
        start_process(folder.path, "n1")
    with folder.locked():
        folder.places(3, 0)
        with pytest.raises(FolderError, match="a cluster already runs in"), folder.locked():
            pass
        with pytest.raises(ControlError, match="is starting or stopping"):
            start_process(folder.path, "n1")
        folder.note_running(Control(free_port(), "key"))
        with pytest.raises(ControlError, match="the launcher does not answer"):
            start_process(folder.path, "n1")
    with folder.locked(), pytest.raises(FolderError, match="has a cluster of 3 nodes, not of 5"):
        folder.places(5, 0)


def test_number_of_nodes_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(Options(data_dir=tmp_path / "new", nodes=4)) == 2
    assert capsys.readouterr().err == "contrail: a cluster has 3 or 5 nodes, not 4\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["", "{", "null", '[{"name": "n1"}]', "\xff"])
def test_layout_that_is_not_one_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "cluster.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(FolderError, match=r"cluster\.json cannot be read"):
        Folder(tmp_path).places(3, 0)
    assert (tmp_path / "cluster.json").read_bytes() == content.encode("latin-1")
