"""The repository keeps its own rules, and each check is shown to fail when its rule is broken."""

import gc
import tomllib
from collections.abc import Callable, Iterator

import pytest

from tests.checks import blocking, code, documents, packaging, text
from tests.checks.repository import ROOT, File, repository_files

FILES = list(repository_files())
BY_PATH = {file.path: file for file in FILES}
PYTHON = [file for file in FILES if file.is_python]
MODULES = [file for file in PYTHON if file.module]
DOCUMENTS = [file for file in FILES if file.path.endswith(".md")]
LOCKS = [file for file in FILES if file.path.endswith("requirements.lock")]
DECISION_INDEX = "docs/decisions/README.md"
DECISIONS = [
    file
    for file in DOCUMENTS
    if file.path.startswith("docs/decisions/") and file.path != DECISION_INDEX
]
# The Apache License names example addresses and has its own layout.
OWN_TEXT = [file for file in FILES if file.path != "LICENSE"]
# In a simulation, sleeping takes no time.
AWAKE = [file for file in PYTHON if file.is_test and not file.path.startswith("tests/sim/")]

Check = Callable[[File], list[str]]


@pytest.fixture(scope="module", autouse=True)
def parsed() -> Iterator[None]:
    """Parse all modules, and spare the garbage collector their millions of nodes."""
    gc.disable()
    for file in PYTHON:
        assert file.nodes
    gc.freeze()
    gc.enable()
    yield
    for file in PYTHON:
        del vars(file)["nodes"], vars(file)["tree"]
    gc.unfreeze()


@pytest.mark.parametrize(
    ("check", "files"),
    [
        pytest.param(code.oversized, PYTHON, id="functions and modules are short"),
        pytest.param(code.deeply_nested, PYTHON, id="functions are flat"),
        pytest.param(code.without_docstring, PYTHON, id="modules say what they are for"),
        pytest.param(code.unexplained_fields, MODULES, id="fields say what they are"),
        pytest.param(code.sleeping, AWAKE, id="tests do not sleep"),
        pytest.param(
            code.reading_clock_or_chance,
            [f for f in MODULES if packaging.is_core(f)],
            id="cores take time and chance as arguments",
        ),
        pytest.param(text.top_headings, DOCUMENTS, id="documents have one title"),
        pytest.param(
            documents.malformed_decision, DECISIONS, id="decisions are short and have one form"
        ),
        pytest.param(
            text.long_page,
            [file for file in DOCUMENTS if file.path.endswith("DESIGN.md")],
            id="design pages are short",
        ),
        pytest.param(text.machine_paths, OWN_TEXT, id="no path of one machine"),
        pytest.param(text.registry_addresses, OWN_TEXT, id="no address of a registry"),
        pytest.param(text.unfinished, OWN_TEXT, id="nothing is left for later"),
        pytest.param(text.unpinned, LOCKS, id="the locks are complete"),
    ],
)
def test_repository_keeps_rule(check: Check, files: list[File]) -> None:
    assert files, "the rule would hold for nothing"
    assert [problem for file in files for problem in check(file)] == []


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("ARCHITECTURE.md", 80)])
def test_a_page_to_begin_with_is_short(page: str, lines: int) -> None:
    assert len(BY_PATH[page].text.splitlines()) <= lines


def test_distributions_declare_what_they_import() -> None:
    assert packaging.undeclared_imports(FILES) == []


def test_changelog_has_a_section_for_the_current_version() -> None:
    about = BY_PATH["libs/common/src/contrail_common/__about__.py"]
    assert packaging.undocumented_version(about, BY_PATH["CHANGELOG.md"]) == []


def test_every_decision_is_listed_once() -> None:
    paths = [file.path for file in DECISIONS]
    assert documents.not_listed_once(BY_PATH[DECISION_INDEX], paths) == []


def test_links_between_documents_lead_somewhere() -> None:
    assert [problem for file in DOCUMENTS for problem in documents.dead_links(file, BY_PATH)] == []


def test_every_module_of_the_vocabulary_is_pure() -> None:
    kept = ("contrail_common.", "contrail_link.")
    pure = {name for name in _purity_contract() if name.startswith(kept)}
    assert packaging.impure_vocabulary(FILES, pure) == []


def test_purity_contract_names_every_core() -> None:
    cores = {
        ".".join(str(file.module).split(".")[:2]) for file in MODULES if packaging.is_core(file)
    }
    assert cores <= _purity_contract()


def test_blocking_client_is_what_the_asynchronous_one_makes_of_it() -> None:
    assert list(blocking.outdated(FILES)) == [], "run `make blocking`"


def test_every_distribution_has_a_design_page() -> None:
    projects = [path for path in BY_PATH if path.endswith("/pyproject.toml")]
    folders = [path.removesuffix("/pyproject.toml") for path in projects]
    assert folders
    assert [folder for folder in folders if f"{folder}/DESIGN.md" not in BY_PATH] == []


def test_no_second_lock_file_is_kept() -> None:
    ignored = BY_PATH[".gitignore"].text.splitlines()
    assert "uv.lock" in ignored


def _purity_contract() -> set[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    [purity] = [each for each in contracts if each["name"].startswith("cores and vocabulary")]
    return set(purity["source_modules"])


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * code.FUNCTION_LINES_MAX
LONG_MODULE = "x = 1\n" * (code.MODULE_LINES_MAX + 1)
REASON = "# One module: the parts only make sense together.\n"
REASONED_MODULE = REASON + "x = 1\n" * code.REASONED_LINES_MAX
DEEP_FUNCTION = """
def deep():
    for a in b:
        while a:
            with a:
                try:
                    match a:
                        case 1:
                            pass
                finally:
                    pass
"""
FLAT_CHAIN = """
def flat(a):
    if a == 1:
        pass
    elif a == 2:
        pass
    elif a == 3:
        pass
    elif a == 4:
        pass
    elif a == 5:
        pass
"""
FIELDS = "class Large:\n    _kind: int\n    def __init__(self):\n" + "".join(
    f"        self._{name} = 0  # known\n" for name in "abcdefghi"
)
HASH = "    --hash=sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("check", "planted"),
    [
        (code.oversized, LONG_FUNCTION),
        (code.oversized, LONG_MODULE),
        (code.oversized, REASONED_MODULE),
        (code.deeply_nested, DEEP_FUNCTION),
        (code.without_docstring, "x = 1\n"),
        (code.unexplained_fields, FIELDS + "        # Known.\n        self._j = 0\n"),
        (
            code.unexplained_fields,
            FIELDS.replace("_kind: int", "_kind: int  # a") + "        self._j: int = 0\n",
        ),
        (code.sleeping, "import time\n\ndef test_it():\n    time.sleep(1)\n"),
        (
            code.sleeping,
            "from asyncio import sleep\n\nasync def test_it():\n    await sleep(0.1)\n",
        ),
        (code.reading_clock_or_chance, "import datetime\nx = datetime.datetime.now()\n"),
        (code.reading_clock_or_chance, "import time\nx = time.time_ns()\n"),
        (code.reading_clock_or_chance, "import random\nx = random.random()\n"),
        (text.top_headings, "# One\n\n# Two\n"),
        (text.top_headings, "no title\n"),
        (text.long_page, "x\n" * (text.PAGE_LINES_MAX + 1)),
        (text.long_page, "x" * (text.PAGE_WIDTH_MAX + 1)),
        (text.machine_paths, "see /" + "home/ann/notes\n"),
        (text.machine_paths, "open('/" + "work/data')\n"),
        (text.registry_addresses, "https://" + "pypi" + ".org/simple\n"),
        (text.unfinished, "# TO" + "DO: later\n"),
        (text.unpinned, "left-pad==1.0\n"),
        (text.unpinned, "left-pad>=1.0 \\\n" + HASH + "\n"),
    ],
)
def test_check_finds_the_planted_fault(check: Check, planted: str) -> None:
    assert check(File("planted.py", planted)) != []


@pytest.mark.parametrize(
    ("check", "clean"),
    [
        (code.oversized, LONG_FUNCTION.removesuffix("    x = 1\n")),
        (code.oversized, REASONED_MODULE.removesuffix("x = 1\n")),
        (code.deeply_nested, FLAT_CHAIN),
        (code.unexplained_fields, FIELDS),
        (
            code.unexplained_fields,
            FIELDS.replace("int\n", 'int\n    """What it is."""\n')
            + "        # Known.\n        self._j = 0\n",
        ),
        (
            code.sleeping,
            "def wait_until(condition):\n    while not condition():\n        sleep(1)\n",
        ),
        (code.sleeping, "async def test_it():\n    await asyncio.sleep(0)\n"),
        (code.reading_clock_or_chance, "x = message.time\ny = self.now\n"),
        (text.top_headings, "# One\n\n```\n# comment\n```\n"),
        (text.long_page, "| " + "x" * text.PAGE_WIDTH_MAX + " |\n"),
        (text.machine_paths, "GET /v1/work/1 and http://host/home/x and src/root.py\n"),
        (text.unpinned, "pad==1.0 \\\n" + HASH + " \\\n" + HASH + "\n    # via it\n"),
    ],
)
def test_check_passes_what_only_looks_like_a_fault(check: Check, clean: str) -> None:
    assert check(File("clean.py", clean)) == []


def test_undeclared_import_is_found() -> None:
    project = File("libs/a/pyproject.toml", '[project]\ndependencies = ["good-one>=1"]\n')
    module = File("libs/a/src/a/m.py", "import os\nimport a.n\nimport good_one\nimport bad\n")
    assert packaging.undeclared_imports([project, module]) == [
        "libs/a/src/a/m.py:4: bad is not declared in libs/a/pyproject.toml"
    ]


def test_version_without_changelog_section_is_found() -> None:
    about = File("__about__.py", '__version__ = "2.0.0"\n')
    changelog = File("CHANGELOG.md", "# Changelog\n\n## 1.0.0\n")
    assert packaging.undocumented_version(about, changelog) == [
        "CHANGELOG.md: no section for 2.0.0"
    ]


DECISION = "# 7. Title\n\n**Decision.** This.\n\n**Why.** So.\n\n**Against.** That.\n"


@pytest.mark.parametrize(
    "planted",
    [
        DECISION.replace("# 7.", "# 8."),
        DECISION.replace("**Why.** So.\n\n", ""),
        DECISION.replace("Why", "Measured"),
        DECISION + "\n**Cost.** Much.\n",
        DECISION.replace("**Decision", "Before.\n\n**Decision"),
        DECISION + "\n" * documents.DECISION_LINES_MAX,
        DECISION + "x" * (documents.DECISION_COLUMNS_MAX + 1),
    ],
)
def test_malformed_decision_is_found(planted: str) -> None:
    assert len(documents.malformed_decision(File("docs/decisions/0007-a.md", planted))) == 1


@pytest.mark.parametrize(
    "clean",
    [
        DECISION,
        DECISION + "\n**Not reached.** More.\n",
        DECISION.replace("**Decision", "Superseded by [8](0008-b.md).\n\n**Decision"),
    ],
)
def test_well_formed_decision_passes(clean: str) -> None:
    assert documents.malformed_decision(File("docs/decisions/0007-a.md", clean)) == []


def test_decision_that_is_listed_twice_or_never_is_found() -> None:
    index = File("docs/decisions/README.md", "[1](0001-a.md), [1](0001-a.md), [2](0002-b.md)\n")
    paths = [f"docs/decisions/{name}.md" for name in ("0001-a", "0002-b", "0003-c")]
    assert documents.not_listed_once(index, paths) == [
        "docs/decisions/README.md: 0001-a.md is not listed once",
        "docs/decisions/README.md: 0003-c.md is not listed once",
    ]


def test_dead_link_is_found() -> None:
    links = ["(b.md)", "(b.md#two-words)", "(../README.md)", "(.)", "(#a)", "(https://host/x)"]
    dead = ["(c.md)", "(b.md#three)", "(../b.md)", "(#c)"]
    page = File("docs/a.md", "# A\n" + "\n".join(f"[x]{link}" for link in links + dead))
    files = {file.path: file for file in (page, File("docs/b.md", "# Two `words`\n"))}
    files["README.md"] = File("README.md", "# R\n")
    assert documents.dead_links(page, files) == [f"docs/a.md: dead link ]{link}" for link in dead]


ASYNCHRONOUS = '''\
"""Things. `contrail_client.blocking.things` is generated from this module."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from contrail_client.live.reader import AsyncOrderedReader


class AsyncThings:  # blocking: class Things(Base):
    """Tasks of one event loop may share them: `await things.wait()`."""

    async def __aenter__(self) -> "AsyncThings":
        await asyncio.sleep(1)

    async def all(self, reader: AsyncOrderedReader) -> AsyncGenerator[dict[str, int], None]:
        async with aclosing(self._some()) as some:
            async for each in some:
                yield each
'''
BLOCKING = '''\
# Generated from aio/things.py by `make blocking`. Change that file, not this one.
"""Things."""

import time
from collections.abc import Generator
from contextlib import closing

from contrail_client.live.blocking import OrderedReader


class Things(Base):
    """Threads may share them: `things.wait()`."""

    def __enter__(self) -> "Things":
        time.sleep(1)

    def all(self, reader: OrderedReader) -> Generator[dict[str, int], None, None]:
        with closing(self._some()) as some:
            yield from some
'''


def test_blocking_form_has_no_trace_of_asyncio() -> None:
    assert blocking.blocking_form(File(f"{blocking.SOURCE}aio/things.py", ASYNCHRONOUS)) == BLOCKING


@pytest.mark.parametrize("path", ["aio/things.py", "transport/aio.py"])
def test_blocking_form_that_is_changed_missing_or_left_over_is_found(path: str) -> None:
    source = File(blocking.SOURCE + path, ASYNCHRONOUS)
    target = str(blocking.blocking_path(source.path))
    made = File(target, blocking.blocking_form(source))
    changed = File(target, made.text + "\n")
    assert blocking.outdated([source, made]) == {}
    assert blocking.outdated([source, changed]) == {target: made.text}
    assert blocking.outdated([source]) == {target: made.text}
    assert blocking.outdated([made]) == {target: None}


def test_unprotected_and_vanished_vocabulary_is_found() -> None:
    folder = "libs/common/src/contrail_common"
    files = [File(f"{folder}/{name}.py", "") for name in ("new", "__about__", "columns/__init__")]
    assert packaging.impure_vocabulary(files, {"contrail_common.old"}) == [
        "contrail_common.new: not declared pure",
        "contrail_common.old: declared pure, but missing",
    ]
