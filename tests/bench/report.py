"""The report: a table for the terminal, a document, and JSON for machines."""

import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.bench.figures import Beside, Case, Measured, Run
from tests.bench.stages import Cost, Profile

FIGURES: Final = "figures: written by python -m tests.bench"
CLUSTERED: Final = "cluster: written by python -m tests.bench --cluster"
STAGED: Final = "stages: written by python -m tests.bench"
SCALE: Final = "scale: written by python -m tests.bench --scale"
"""The sections of the document that the benchmark writes, as the comments around them say."""

Results = Mapping[str, Measured | None]


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one run of the benchmark, by the name of the case."""

    cases: Mapping[str, Case]
    results: Results
    command: str
    begun: datetime

    def line(self, name: str) -> str:
        """Return a case as a line of text, and below it a line for each comparison."""
        case, measured = self.cases[name], self.results[name]
        if measured is None:
            return f"{case.title:58} not installed"
        verdict = {None: "", True: f"aim {number(case.aim)} met"}.get(
            case.meets_aim(measured), f"aim {number(case.aim)} MISSED"
        )
        parts = [f"{case.title:58} {_measured(case, measured)}", verdict, _costs(measured)]
        parts += [measured.note, _disturbed(measured)]
        lines = ["  ".join(part for part in parts if part)]
        for ratio, reference, met in self._ratios(name, "MISSED"):
            lines.append(f"    {ratio} x {reference}" + (f"; aim {met}" if met else ""))
        return "\n".join(lines)

    def document(self) -> str:
        """Return the tables of docs/benchmarks.md.

        There are three, because one with all columns would be too wide to read.
        """
        parts = (self._circumstances(), self._medians(), self._comparisons(), self._resources())
        return "\n\n".join("\n".join(part) for part in parts)

    def stages(self, name: str, functions: int = 0) -> Iterator[str]:
        """Yield a line with the CPU of a message by stage, and one with its calls.

        Below them are ``functions`` functions of each stage, if the case has a profile.
        """
        measured = self.results[name]
        if measured is None or measured.profile is None:
            return
        profile = measured.profile
        cpu, calls = (["µs", *_by_stage(profile, _cpu_us)], ["calls", *_by_stage(profile, _calls)])
        widths = [max(map(len, cells)) for cells in zip(cpu, calls, strict=True)]
        for cells in (cpu, calls):
            padded = (f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
            yield ("    " + "  ".join(padded)).rstrip()
        for stage in profile.stages() if functions else ():
            yield f"    {stage}"
            for function, cost in profile.top(stage, functions):
                yield f"    {number(cost.cpu_us):>8} µs {number(cost.calls):>8} calls  {function}"

    def stage_table(self) -> str:
        """Return the table of the stages in docs/benchmarks.md."""
        lines = [*self._circumstances(), "", "| Figure | CPU (µs) | Calls |", "|---|---|---|"]
        for name, measured in self.results.items():
            if measured is not None and measured.profile is not None:
                sums = [
                    f"{total}: {', '.join(stages)}"
                    for total, *stages in (
                        _by_stage(measured.profile, _cpu_us),
                        _by_stage(measured.profile, _calls),
                    )
                ]
                lines.append(f"| {self.cases[name].title} | {' | '.join(sums)} |")
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return all figures and runs as JSON."""
        document: dict[str, Any] = {
            "begun": self.begun.isoformat(),
            "command": self.command,
            "machine": dict(_machine()),
            "figures": [
                {
                    "name": name,
                    "title": case.title,
                    "unit": case.unit,
                    "aim": case.aim,
                    "met": measured and case.meets_aim(measured),
                    "median": measured and measured.value,
                    "note": measured.note if measured else "not installed",
                    "runs": [_as_json(run) for run in measured.runs] if measured else [],
                    "stages": _stages_as_json(measured),
                    "beside": [
                        {
                            **asdict(beside),
                            "value": value,
                            "ratio": ratio,
                            "met": case.reaches(ratio, beside.aim),
                        }
                        for beside, value, ratio, _ in self._references(name)
                    ],
                }
                for name, measured in self.results.items()
                for case in [self.cases[name]]
            ],
        }
        return json.dumps(document, indent=2) + "\n"

    def _references(self, name: str) -> Iterator[tuple[Beside, float, float, float | None]]:
        """Yield the references of a case that were measured: their values, and the ratios to them.

        The last is the ratio of CPU; None unless both were measured in turns.
        """
        measured = self.results[name]
        for beside in self.cases[name].beside if measured else ():
            turns = measured.beside.get(beside.reference)
            reference = turns or self.results.get(beside.reference)
            if reference is None:
                continue
            ratio, cpu = measured.value / reference.value, None
            if turns is not None:
                ratio = measured.ratio_to(turns, _value) or ratio
                cpu = measured.ratio_to(turns, _server_us)
            yield beside, reference.value * beside.factor, ratio / beside.factor, cpu

    def _ratios(self, name: str, missed: str) -> Iterator[tuple[str, str, str]]:
        """Yield the ratio to each reference, the reference with its value, and the verdict."""
        case = self.cases[name]
        for beside, value, ratio, cpu in self._references(name):
            shown = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
            verdict = {None: "", True: f"{number(beside.aim)}: met"}.get(
                case.reaches(ratio, beside.aim), f"{number(beside.aim)}: {missed}"
            )
            by_cpu = f", in turns; CPU {cpu:.2f} x" if cpu is not None else ""
            yield shown, f"{beside.meaning} ({number(value)}{by_cpu})", verdict

    def _circumstances(self) -> Iterator[str]:
        return circumstances(self.begun, self.command)

    def _medians(self) -> Iterator[str]:
        yield "| Figure | Median (min to max) | Aim |"
        yield "|---|---|---|"
        for name, measured in self.results.items():
            case = self.cases[name]
            if measured is None:
                yield f"| {case.title} | not installed | |"
                continue
            met = {None: "", True: f"{number(case.aim)}: met"}.get(
                case.meets_aim(measured), f"{number(case.aim)}: **missed**"
            )
            yield f"| {case.title} | {_measured(case, measured)} | {met} |"

    def _comparisons(self) -> Iterator[str]:
        yield "Ratios to limits of the machine and to other servers, measured in the same run:"
        yield ""
        yield "| Figure | Ratio | To | Aim |"
        yield "|---|---|---|---|"
        for name, measured in self.results.items():
            if measured is None:
                continue
            title = self.cases[name].title
            for ratio, reference, met in self._ratios(name, "**missed**"):
                yield f"| {title} | {ratio} | {reference} | {met} |"
                title = ""

    def _resources(self) -> Iterator[str]:
        yield "CPU of server and client for each message, latency, and notes:"
        yield ""
        yield "| Figure | CPU | p50, p99 | Note |"
        yield "|---|---|---|---|"
        for name, measured in self.results.items():
            if measured is not None:
                note = " ".join(filter(None, (measured.note, _disturbed(measured))))
                cells = [self.cases[name].title, _cpu(measured), _latency(measured), note]
                yield "| " + " | ".join(cells) + " |"


def circumstances(begun: datetime, command: str) -> Iterator[str]:
    """When, how and on which machine something was measured, as lines of the document."""
    yield f"Measured {begun:%Y-%m-%d %H:%M} UTC with `{command}`."
    yield ""
    for name, value in _machine():
        yield f"- {name}: {value}"


def number(value: float | None) -> str:
    """A number as people read it: no more digits than mean something."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _measured(case: Case, measured: Measured) -> str:
    low, high = measured.spread
    spread = f" ({number(low)} to {number(high)})" if len(measured.runs) > 1 else ""
    return f"{number(measured.value)} {case.unit}{spread}"


def _costs(measured: Measured) -> str:
    return "; ".join(filter(None, (_cpu(measured), _latency(measured))))


def _cpu(measured: Measured) -> str:
    server = measured.median_of(_server_us)
    client = measured.median_of(lambda run: run.client_us)
    shown = [f"{value:.3g}" for value in (server, client) if value is not None]
    return " + ".join(shown) + " µs" if shown else ""


def _latency(measured: Measured) -> str:
    percentiles = [measured.median_of(_p50), measured.median_of(_p99)]
    shown = [f"{value * 1e3:.3g}" for value in percentiles if value is not None]
    return ", ".join(shown) + " ms" if shown else ""


def _by_stage(profile: Profile, quantity: Callable[[Cost], float]) -> list[str]:
    """The total, and each stage with its part."""
    total = quantity(profile.total())
    parts = {stage: quantity(cost) for stage, cost in profile.stages().items()}
    digits = max(0, 2 - math.floor(math.log10(total))) if total else 0
    return [number(total), *(f"{stage} {part:,.{digits}f}" for stage, part in parts.items())]


def _cpu_us(cost: Cost) -> float:
    return cost.cpu_us


def _calls(cost: Cost) -> float:
    return cost.calls


def _as_json(run: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "costs"}


def _stages_as_json(measured: Measured | None) -> dict[str, dict[str, float]]:
    if measured is None or measured.profile is None:
        return {}
    return {stage: asdict(cost) for stage, cost in measured.profile.stages().items()}


def _value(run: Run) -> float:
    return run.value


def _server_us(run: Run) -> float | None:
    return run.server_us


def _p50(run: Run) -> float | None:
    return run.p50_s


def _p99(run: Run) -> float | None:
    return run.p99_s


def _disturbed(measured: Measured) -> str:
    if not measured.disturbed:
        return ""
    cores = max(run.other_cores for run in measured.runs)
    return f"(disturbed: other processes used up to {cores:.1f} cores)"


def _machine() -> Iterator[tuple[str, str]]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    yield "machine", f"{cores} cores ({cpu[1] if cpu else platform.machine()}), {memory:.0f} GiB"
    yield "system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"


def now() -> datetime:
    """The time of the report."""
    return datetime.now(UTC)


def write_into(path: Path, figures: str, section: str = FIGURES) -> None:
    """Replace what is between the two marks of ``section`` in the document at ``path``."""
    text = path.read_text(encoding="utf-8")
    opening, closing = f"<!-- {section} -->", f"<!-- end of {section.partition(':')[0]} -->"
    before, begin, rest = text.partition(opening)
    _, end, after = rest.partition(closing)
    if not (begin and end):
        raise ValueError(f"{path} has no place for figures")
    path.write_text(f"{before}{begin}\n\n{figures}\n\n{end}{after}", encoding="utf-8")
