"""The generators and what their clients need, installed once for each set of pinned versions.

Everything lies under one folder of the environment. pip, npm, Maven and Go fetch it from where they
are set up to, and keep it in caches of their own.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENT = ROOT / "openapi" / "openapi.json"
FOLDER = Path(sys.prefix) / "generated-clients"
TIMEOUT_S = 900


def needs(*programs: str) -> None:
    """Skip the test unless all ``programs`` are there."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not on this machine: {', '.join(missing)}")


def run(*command: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """What ``command`` writes, errors included; AssertionError with it when the command fails."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def python_tools() -> Path:
    """The programs of the Python packages: generators, and an interpreter for their clients."""
    lock = HERE / "python" / "requirements.lock"

    def install(folder: Path) -> None:
        run(sys.executable, "-m", "venv", folder)
        pip = (folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "install", "--require-hashes", "--no-deps", "-r", lock)

    return _installed("python", [lock], install) / "bin"


def node_tools() -> Path:
    """The folder whose ``node_modules`` has the packages for TypeScript and both linters."""
    files = [HERE / "node" / name for name in ("package.json", "package-lock.json")]

    def install(folder: Path) -> None:
        folder.mkdir(parents=True)
        for file in files:
            shutil.copy(file, folder)
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)

    return _installed("node", files, install)


def node_tool(name: str) -> Path:
    """A program of :func:`node_tools`."""
    return node_tools() / "node_modules" / ".bin" / name


def oapi_codegen() -> Path:
    """Go's generator, built from source as ``go.mod`` pins it."""
    files = [HERE / "go" / name for name in ("go.mod", "go.sum")]

    def install(folder: Path) -> None:
        package = "github.com/oapi-codegen/oapi-codegen/v2/cmd/oapi-codegen"
        run("go", "build", "-o", f"{folder}/", package, folder=HERE / "go")

    return _installed("go", files, install) / "oapi-codegen"


def openapi_generator_jar() -> Path:
    """The jar of openapi-generator, as its Python package ships it."""
    packages = python_tools().parent / "lib"
    [jar] = packages.glob("python*/site-packages/openapi_generator_cli/openapi-generator.jar")
    return jar


def java_libraries(generated: Path) -> Path:
    """The libraries that the generated ``pom.xml`` asks for."""
    pom = generated / "pom.xml"

    def install(folder: Path) -> None:
        copy = ("dependency:copy-dependencies", "-DincludeScope=compile")
        run("mvn", "-q", "-B", *copy, f"-DoutputDirectory={folder}", folder=generated)

    return _installed("java", [pom], install)


def _installed(name: str, files: list[Path], install: Callable[[Path], None]) -> Path:
    """The folder that ``install`` made for these ``files``; whoever comes meanwhile waits."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = FOLDER / f"{name}-{digest}"
    done = folder.with_suffix(".done")
    with _alone(FOLDER / f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            install(folder)
            done.touch()
    return folder


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
