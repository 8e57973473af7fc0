"""What earlier releases wrote is read as it was meant, and this code still writes the same."""

from tests.formats.fill import says
from tests.formats.golden import golden, meaning_of, releases
from tests.formats.samples import FORMATS
from tests.support.each import each


@each("release", releases())
def test_bytes_of_a_release_mean_what_they_meant(release: str) -> None:
    wrong = [
        f"{one.format}: {one.name}"
        for one in golden(release)
        if not says(meaning_of(one.format, one.name, one.data), one.means)
    ]
    assert not wrong


def test_this_code_writes_what_the_newest_files_have() -> None:
    newest = releases()[-1]
    written = {
        (name, sample): data
        for name, format_ in FORMATS.items()
        for sample, data in format_.written().items()
    }
    kept = {(one.format, one.name): one.data for one in golden(newest)}
    command = f"python -m tests.formats.golden {newest}"
    missing = sorted(written.keys() - kept.keys())
    assert not missing, f"new: {missing}; run: {command}"
    changed = sorted(name for name, data in kept.items() if written.get(name) != data)
    advice = (
        f"raise the version of the format; if no release has it yet, remove the lines, {command}"
    )
    assert not changed, f"changed: {changed}; {advice}"
