"""Costs by stage: every module has a stage, sums are whole, and a publish is seen in each stage."""

import importlib.util
import json
import pkgutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import contrail_api
import contrail_common
import contrail_edge
import contrail_gateway
import contrail_link
import contrail_replicator
import contrail_serve
import contrail_storage
from tests.bench.cases import CASES, PROFILED
from tests.bench.figures import Case, Measured, Run
from tests.bench.http_scripts import Publishing, Singles
from tests.bench.load import Load, drive
from tests.bench.profiler import Calls, Cpu
from tests.bench.report import Report, now
from tests.bench.server import profiled
from tests.bench.stages import MODULES, OTHER, STAGES, Cost, Profile, stage_of

SERVER = (
    contrail_api,
    contrail_common,
    contrail_edge,
    contrail_gateway,
    contrail_link,
    contrail_replicator,
    contrail_serve,
    contrail_storage,
)
PUBLISHED = {"http", "api", "link", "streams", "propose", "raft", "log", "apply", "store"}
MESSAGES = 200


def packages(package: ModuleType) -> Iterator[str]:
    yield package.__name__
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if module.ispkg:
            yield module.name


@pytest.mark.parametrize("package", SERVER, ids=lambda package: package.__name__)
def test_every_package_of_the_server_has_a_stage(package: ModuleType) -> None:
    # The stage of the parent is enough, unless packages beside it have stages of their own.
    every = list(packages(package))
    split = {name.rpartition(".")[0] for name in every if name in MODULES}
    for name in every:
        assert stage_of(name) != OTHER
        assert name in MODULES or name.rpartition(".")[0] not in split, name


def test_stages_are_those_of_modules_that_exist() -> None:
    assert [name for name in MODULES if importlib.util.find_spec(name) is None] == []
    assert set(MODULES.values()) - {"shared"} == set(STAGES) - {OTHER}


def test_library_has_no_stage() -> None:
    assert stage_of("threading") == OTHER
    assert stage_of("contrail_storage_else.wal") == OTHER


def test_cpu_of_stages_is_scaled_to_that_without_a_profiler() -> None:
    calls = {("http", "a"): 2.0, ("log", "b"): 1.0}
    cpu_ns = {("http", "a"): 60_000.0, ("http", "c"): 15_000.0, ("log", "b"): 25_000.0}
    profile = Profile.of(calls, cpu_ns, server_us=40.0)
    assert profile.stages() == {"http": Cost(2, 30), "log": Cost(1, 10), OTHER: Cost(0, 0)}
    assert profile.total() == Cost(3, 40)
    assert profile.top("http", 1) == [("a", Cost(2, 24))]


def test_stages_below_two_percent_are_other_ones() -> None:
    cpu_ns = {("http", "a"): 97.0, ("raft", "b"): 1.5, (OTHER, "c"): 1.5}
    calls = {("http", "a"): 97.0, ("raft", "b"): 1.5, ("read", "d"): 3.0}
    stages = Profile.of(calls, cpu_ns, server_us=100.0).stages()
    assert stages == {"http": Cost(97, 97), "read": Cost(3, 0), OTHER: Cost(1.5, 3)}


def test_report_has_a_line_of_cpu_and_one_of_calls_by_stage() -> None:
    profile = Profile.of(
        {("http", "a"): 30.25, ("log", "b"): 8.5}, {("http", "a"): 3.0, ("log", "b"): 1.0}, 40.0
    )
    cases = {"case": Case("case", "the case", "/s", lambda _: None)}
    results = {"case": Measured((Run(160.0, server_us=40.0),), profile=profile)}
    report = Report(cases, results, "command", now())
    assert list(report.stages("case")) == [
        "    µs     40    http 30.0  log 10.0  other 0.0",
        "    calls  38.8  http 30.2  log 8.5   other 0.0",
    ]
    assert list(report.stages("case", functions=1))[-3:] == [
        "    log",
        "          10 µs      8.5 calls  b",
        "    other",
    ]
    row = "| the case | 40: http 30.0, log 10.0, other 0.0 | 38.8: http 30.2, log 8.5, other 0.0 |"
    assert row in report.stage_table()
    [figure] = json.loads(report.as_json())["figures"]
    assert figure["stages"]["log"] == {"calls": 8.5, "cpu_us": 10.0}
    assert "costs" not in figure["runs"][0]


def test_profiled_cases_are_those_of_messages() -> None:
    assert {"single-1", "batch-100", "pull-columns", "last-get", "replay", "ws-push"} <= PROFILED
    assert set(CASES) >= PROFILED


BURN = """
from time import thread_time

def burn(seconds):
    until = thread_time() + seconds
    while thread_time() < until:
        idle()

def idle():
    return [number for number in range(20)]
"""


def module(name: str, text: str = BURN, **names: Any) -> dict[str, Any]:
    variables = {"__name__": name, **names}
    exec(compile(text, name, "exec"), variables)
    return variables


@pytest.fixture
def cpu() -> Iterator[Cpu]:
    before = signal.getsignal(signal.SIGALRM)
    profiler = Cpu()
    profiler.install()
    yield profiler
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def calls() -> Iterator[Calls]:
    before = sys.getprofile(), threading.getprofile()
    profiler = Calls()
    profiler.install()
    yield profiler
    sys.setprofile(before[0])
    threading.setprofile(before[1])


def test_samples_give_the_cpu_of_each_thread_to_its_functions(cpu: Cpu) -> None:
    shared = module("contrail_common.c")
    link = module("contrail_link.d", "def work():\n    burn(0.1)\n", burn=shared["burn"])
    # A pool of one thread: what it uses after its work, until the next sample, is for that work.
    wait = module("pool", "def run(burn):\n    burn(0.4)\n    rest(0.1)\n", rest=shared["burn"])
    thread = threading.Thread(target=wait["run"], args=(module("contrail_edge.b")["burn"],))
    thread.start()
    module("contrail_api.a")["burn"](0.2)
    link["work"]()
    while thread.is_alive():
        # A thread that waits for another one, unlike an event loop, is not interrupted.
        shared["burn"](0.001)
    costs = cpu.costs()
    by_stage = {
        stage: sum(cost for (of, _), cost in costs.items() if of == stage) / 1e9
        for stage in ("http", "api", "link")
    }
    assert by_stage == pytest.approx({"http": 0.5, "api": 0.2, "link": 0.1}, abs=0.05)
    assert ("link", "contrail_common.c.burn") in costs


def test_calls_are_counted_exactly_in_all_threads(calls: Calls) -> None:
    idle = module("contrail_common.c")["idle"]
    link = module("contrail_link.d", "def work():\n    idle()\n", idle=idle)
    api = module("contrail_api.a")
    thread = threading.Thread(target=api["idle"])
    thread.start()
    thread.join()
    api["idle"]()
    api["idle"]()
    link["work"]()
    assert {one: count for one, count in calls.costs().items() if "contrail_" in one[1]} == {
        (OTHER, "contrail_common.c.<module>"): 1,
        ("link", "contrail_link.d.<module>"): 1,
        ("api", "contrail_api.a.<module>"): 1,
        ("api", "contrail_api.a.idle"): 3,
        ("link", "contrail_link.d.work"): 1,
        ("link", "contrail_common.c.idle"): 1,
    }


@pytest.mark.parametrize(("kind", "stages"), [("calls", PUBLISHED), ("cpu", {"loop", "http"})])
def test_publish_costs_something_in_each_stage(kind: str, stages: set[str], tmp_path: Path) -> None:
    with profiled(kind, tmp_path / "data") as server:
        server.create_stream("S", "s")
        [endless] = Singles("s", 1)()
        requests = [endless.request(b"") or b"" for _ in range(MESSAGES)]
        driven = drive(Load(server.port, server.pid, lambda: [Publishing(iter(requests), 1)]))
        server.check_stored("S", MESSAGES)
    costs = driven.run.costs or {}
    assert {stage for stage, _ in costs} >= stages
    if kind == "calls":
        answered = costs["http", "contrail_edge.app.EdgeApp.answer_directly"]
        assert answered == pytest.approx(1.0, abs=2 / MESSAGES)
