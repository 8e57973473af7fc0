"""The cluster secret is changed while processes that use it run."""

from pathlib import Path

import pytest

from contrail_client import Contrail
from tests.cluster.test_encryption import rotate, wait_until
from tests.support.ports import HOST, free_port
from tests.support.servers import Process, SplitServers

pytestmark = pytest.mark.cluster

OLD, NEW = "the old secret of a test", "the new secret of a test"


def test_secret_is_changed_in_steps_and_the_old_one_is_worth_nothing(tmp_path: Path) -> None:
    file, link_port = tmp_path / "secret", free_port()
    file.write_text(OLD)
    common = {"cluster_secret_file": file}
    edge = {"storage": f"{HOST}:{link_port}", **common}
    log = tmp_path / "stranger.log"
    with (
        Process(
            "storage", tmp_path / "storage.log", data_dir=tmp_path / "data", link_port=link_port,
            **common,
        ) as storage,
        Process("api", tmp_path / "api.log", **edge) as api,
    ):  # fmt: skip
        SplitServers.wait_until_ready([api])
        with Contrail(api.url) as client:
            client.ensure_stream("S", {"subjects": ["s"]})
            for step, text in enumerate((f"{OLD}\n{NEW}", f"{NEW}\n{OLD}", NEW), 1):
                for process in (storage, api):
                    rotate(process, file, text, "cluster_secret_changed")
                assert client.publish("s", b"").seq == step
            rotate(storage, file, "short", "cluster_secret_refused")
            file.write_text(NEW)
            # New connections need the new secret.
            storage.kill()
            storage.start()
            SplitServers.wait_until_ready([api])
            assert client.get_stream("S").state.last_seq == 3
        given = {"storage": edge["storage"], "cluster_secret": OLD}
        with Process("api", log, **given) as stranger, stranger.client() as http:
            wait_until(lambda: "secret" in http.get("/readyz?verbose").text)
            assert http.get("/v1/streams/S").status_code == 503
