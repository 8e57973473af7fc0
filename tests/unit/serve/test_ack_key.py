"""The key that signs ack tokens is kept in the data folder, where that can be written."""

from pathlib import Path

from contrail_serve.node_process import _kept_ack_key
from contrail_serve.settings import ServeSettings


def test_key_that_cannot_be_written_does_not_end_the_start(tmp_path: Path) -> None:
    settings = ServeSettings.of({"data_dir": str(tmp_path)})
    (tmp_path / "ack.key.new").mkdir()  # in the way of the file that is written first
    first, second = _kept_ack_key(settings), _kept_ack_key(settings)
    assert len(first) == len(second) == 32
    assert first != second
    (tmp_path / "ack.key.new").rmdir()
    kept = _kept_ack_key(settings)
    assert _kept_ack_key(settings) == kept
