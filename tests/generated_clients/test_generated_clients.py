"""What six generators make of the document compiles, and does its work against a server.

Each program walks through the same scenario and prints what it saw: create a stream, publish three
messages, consume and acknowledge them, read one by sequence as bytes, update under ``If-Match``,
meet two typed refusals, and a sequence beyond 32 bits.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.generated_clients import tools
from tests.generated_clients.tools import DOCUMENT, HERE, needs, run
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.generators

FAR = 3_000_000_000
SEEN = {
    "published": [1, 2, 3],
    "pulled": [1, 2, 3],
    "acked": [True, True, True],
    "payload": b"\x00\xff\x01".hex(),
    "updated": "guarded",
    "stale": [412, "precondition_failed"],
    "missing": [404, 10059, "stream_not_found"],
    "far": [FAR, FAR, "far"],
}
SHORT_RUN = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
"""For a JVM that ends before optimised code would have paid."""
HARMLESS = (
    "OpenAPI 3.1 support is still in beta",
    # Of the parameter `schema`, which is no model.
    "Schema (reserved word) cannot be used as model name",
    "Failed to get the schema name: null",
    # Of JsonValue: any is what it is.
    "Codegen property is null (e.g. map/dict of undefined type)",
    # It leaves an example out of its README.
    "Ignoring complex example on request body",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("generators") / "data") as running:
        yield running


def check(server: ServerProcess, stream: str, output: str) -> None:
    """The program saw what it should, and the server has what it did."""
    assert json.loads(output.splitlines()[-1]) == SEEN
    with server.client() as client:
        info: dict[str, Any] = client.get(f"/v1/streams/{stream}").json()
        worker = client.get(f"/v1/streams/{stream}/consumers/worker").json()
        payloads = [client.get(f"/v1/streams/{stream}/messages/{seq}") for seq in (1, 2, 3)]
        far = client.get(f"/v1/streams/{stream}-far").json()
    assert [answer.content for answer in payloads] == [b"first", b"\x00\xff\x01", b"third"]
    assert info["config"]["max_age"] == "1h"
    assert info["config"]["description"] == "guarded"
    assert (worker["num_ack_pending"], worker["ack_floor"]["stream_seq"]) == (0, 3)
    assert (far["state"]["first_seq"], far["state"]["last_seq"]) == (FAR, FAR)


def run_python(program: str, generated: Path, server: ServerProcess, stream: str) -> str:
    python = tools.python_tools() / "python"
    run(python, "-m", "compileall", "-q", generated)
    script = HERE / "python" / program
    return run(python, script, server.url, stream, PYTHONPATH=str(generated))


def openapi_generator(language: str, output: Path, *options: str) -> None:
    jar = ("java", *SHORT_RUN, "-jar", tools.openapi_generator_jar())
    said = run(*jar, "generate", "-i", DOCUMENT, "-g", language, "-o", output, *options)
    warnings = [line for line in said.splitlines() if " WARN " in line or " ERROR " in line]
    assert [line for line in warnings if not any(text in line for text in HARMLESS)] == []


def test_openapi_python_client(server: ServerProcess, tmp_path: Path) -> None:
    programs = tools.python_tools()
    said = run(
        programs / "openapi-python-client",
        *("generate", "--path", DOCUMENT, "--output-path", tmp_path / "client"),
        *("--config", HERE / "python" / "openapi_python_client.yaml"),
        PATH=f"{programs}:/usr/bin:/bin",
    )
    assert "warning" not in said.lower(), said
    output = run_python("openapi_python_client.py", tmp_path / "client", server, "attrs")
    check(server, "attrs", output)


def test_openapi_generator_python(server: ServerProcess, tmp_path: Path) -> None:
    needs("java")
    openapi_generator("python", tmp_path)
    check(server, "pydantic", run_python("openapi_generator.py", tmp_path, server, "pydantic"))


def test_openapi_generator_java(server: ServerProcess, tmp_path: Path) -> None:
    needs("java", "javac", "mvn")
    openapi_generator("java", tmp_path, "--library", "native")
    libraries = tools.java_libraries(tmp_path)
    sources = [HERE / "java" / "Scenario.java", *(tmp_path / "src" / "main").rglob("*.java")]
    classes = tmp_path / "classes"
    run(
        "javac",
        *(f"-J{flag}" for flag in SHORT_RUN),
        "-proc:none",
        "-cp",
        f"{libraries}/*",
        "-d",
        classes,
        *sources,
    )
    output = run(
        "java", *SHORT_RUN, "-cp", f"{classes}:{libraries}/*", "Scenario", server.url, "java"
    )
    check(server, "java", output)


def test_oapi_codegen(server: ServerProcess, tmp_path: Path) -> None:
    needs("go")
    for name in ("go.mod", "go.sum", "main.go"):
        shutil.copy(HERE / "go" / name, tmp_path)
    (tmp_path / "contrail").mkdir()
    client = tmp_path / "contrail" / "client.go"
    generate = ("-package", "contrail", "-generate", "types,client", "-o", client)
    assert run(tools.oapi_codegen(), *generate, DOCUMENT) == ""
    check(server, "go", run("go", "run", ".", server.url, "go", folder=tmp_path))


def build_typescript(folder: Path, program: str) -> Path:
    """Compile ``program`` beside what was generated into ``folder``; the JavaScript to run."""
    for name in (program, "tsconfig.json"):
        shutil.copy(HERE / "node" / name, folder)
    (folder / "node_modules").symlink_to(tools.node_tools() / "node_modules")
    run(tools.node_tool("tsc"), "-p", ".", folder=folder)
    return folder / "built" / program.replace(".ts", ".js")


def test_openapi_typescript_and_openapi_fetch(server: ServerProcess, tmp_path: Path) -> None:
    needs("node", "npm")
    # Without the option a field with a default would have to be given.
    options = ("--default-non-nullable=false", "-o", tmp_path / "schema.d.ts")
    said = run(tools.node_tool("openapi-typescript"), DOCUMENT, *options)
    assert "warn" not in said.lower(), said
    script = build_typescript(tmp_path, "openapi_fetch.ts")
    check(server, "fetch", run("node", script, server.url, "fetch"))


def test_hey_api(server: ServerProcess, tmp_path: Path) -> None:
    needs("node", "npm")
    options = ("-i", DOCUMENT, "-o", tmp_path / "hey", "-c", "@hey-api/client-fetch")
    said = run(tools.node_tool("openapi-ts"), *options, folder=tools.node_tools())
    assert "warn" not in said.lower(), said
    script = build_typescript(tmp_path, "hey_api.ts")
    check(server, "hey", run("node", script, server.url, "hey"))


def complaints(document: Path) -> dict[str, bool]:
    """Whether each linter finds anything in ``document``, be it a warning."""
    rules = DOCUMENT.parent
    lints = {
        "redocly": ("lint", "--config", rules / "redocly.yaml", document),
        "spectral": ("lint", "-r", rules / "spectral.yaml", "-F", "warn", document),
    }
    found = {}
    for name, options in lints.items():
        try:
            said = run(tools.node_tool(name), *options)
        except AssertionError as error:
            said = f"You have problems: {error}"
        found[name] = "You have" in said  # so does redocly count warnings, which end well
    return found


def test_linters_find_nothing_but_a_planted_fault(tmp_path: Path) -> None:
    needs("node", "npm")
    assert complaints(DOCUMENT) == {"redocly": False, "spectral": False}
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    answer = document["paths"]["/livez"]["get"]["responses"]["200"]["content"]
    answer["application/json"]["example"] = {"status": 1}
    faulty = tmp_path / "openapi.json"
    faulty.write_text(json.dumps(document), encoding="utf-8")
    assert complaints(faulty) == {"redocly": True, "spectral": True}
