"""Origins in the settings: as browsers send them, or a sentence that says what is wrong."""

import pytest

from contrail_serve.settings import ServeSettings, SettingsError
from tests.support.each import each


def test_origins_are_taken_as_browsers_send_them() -> None:
    given = "https://App.example/, http://localhost:3000"
    found = ServeSettings.of({"allowed_origins": given}).allowed_origins
    assert found == {"https://app.example", "http://localhost:3000"}


@each("bad", ["*", "null", "app.example", "https://app.example/path", "https://"])
def test_what_is_no_origin_is_refused(bad: str) -> None:
    with pytest.raises(SettingsError, match="is not an origin such as https://"):
        ServeSettings.of({"allowed_origins": bad})
