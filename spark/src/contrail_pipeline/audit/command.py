"""The command `contrail pipeline audit`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from contrail_client.cli import show, units
from contrail_client.cli.ending import FAILED, Failed, Misuse
from contrail_client.models import StreamInfo
from contrail_pipeline.job import Job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from contrail_pipeline.audit.checks import RangeReport
    from contrail_pipeline.audit.findings import Finding
    from contrail_pipeline.audit.verdict import ServerView, ShardResult
    from contrail_pipeline.audit.work import RangeTask
    from contrail_spark.lake.manifest import State
    from contrail_spark.lake.store import Lake
    from contrail_spark.plan import ReplayPlan

_DIGEST_SHOWN: Final = 16

Stream = Annotated[str, typer.Argument(help="The stream to check.")]
Replicas = Annotated[
    bool, typer.Option("--replicas", help="Compare the copies of the stream on all its nodes.")
]
LakeFolder = Annotated[
    Path | None,
    typer.Option("--lake", metavar="FOLDER", help="Compare the stream with this lake."),
]


@dataclass(frozen=True, slots=True)
class Audit:
    """What is to be checked, as it was at the begin."""

    job: Job
    info: StreamInfo
    plan: "ReplayPlan"
    before: "ServerView"
    nodes: tuple[str, ...]
    lake: "Lake | None"
    state: "State | None"


def audit(job: Job, stream: Stream, *, replicas: Replicas = False, lake: LakeFolder = None) -> None:
    """Read all of a stream, and check it: order, gaps, times, counts, ids.

    The exit status is 1 if anything is wrong. Messages that retention removes meanwhile are not.
    """
    from contrail_pipeline.audit.lakes import lost_ends, manifest_findings  # noqa: PLC0415

    begun = _begin(job, stream, replicas=replicas, lake=lake)
    tasks = _range_tasks(begun)
    if job.dry_run:
        _announce(begun, tasks)
        return
    findings: list[Finding] = []
    with job.spark() as spark:
        if begun.state is not None:
            findings += manifest_findings(begun.state)
            ends = {shard: one.last_seq for shard, one in begun.before.states.items()}
            findings += lost_ends(begun.state, ends)
            findings += _check_lake(begun, spark)
        if begun.nodes:
            tasks, absent = _without_absent(tasks)
            findings += absent
        reports = _run(job, spark, "Audit", _audit_range(), tasks)
        results = _judged(begun, reports)
        if any(result.ids for result in results):
            findings += _repeated_ids(begun, spark)
    broken = [one.message.split()[0] for one in findings if one.kind == "lake_file"]
    for result in results:
        # What a damaged file is called was said already.
        findings += (
            one
            for one in result.findings
            if one.kind != "lake_file" or one.message.split()[0] not in broken
        )
    _report(begun, reports, results, findings)
    if findings:
        raise typer.Exit(FAILED)


def _begin(job: Job, stream: str, *, replicas: bool, lake: Path | None) -> Audit:
    from contrail_spark.client import ReplayClient  # noqa: PLC0415
    from contrail_spark.errors import ContrailSparkError  # noqa: PLC0415
    from contrail_spark.lake.store import Lake  # noqa: PLC0415
    from contrail_spark.options import parse_options  # noqa: PLC0415

    info = job.client.get_stream(stream)
    nodes = _nodes(info) if replicas else ()
    if replicas and len(nodes) < 2:  # noqa: PLR2004
        raise Misuse(f"stream {stream} has one copy, so there is nothing to compare it with")
    try:
        plan = ReplayClient(parse_options(_options(job, stream))).plan()
        opened = state = None
        if lake is not None:
            opened = Lake.open(lake)
            opened.check_stream(stream, plan.incarnation)
            state = opened.state()
    except ContrailSparkError as error:
        raise Failed(str(error)) from error
    shards = [one.shard for one in plan.shards]
    return Audit(job, info, plan, _server_view(job, stream, shards), nodes, opened, state)


def _options(job: Job, stream: str) -> dict[str, str]:
    return job.server_options(stream) | {
        "failOnDataLoss": "false",
        "minPartitions": "8",
        "maxBytesPerPartition": "64m",
    }


def _nodes(info: StreamInfo) -> tuple[str, ...]:
    """The nodes with a copy, the leader first."""
    names = [str(info.cluster.get("leader", ""))]
    names += [str(one["name"]) for one in info.cluster.get("replicas", [])]
    return tuple(name for name in names if name)


def _server_view(job: Job, stream: str, shards: Sequence[int]) -> "ServerView":
    from contrail_pipeline.audit.verdict import ServerView  # noqa: PLC0415

    # The runs first: what the state counts as deleted later may be more, but not less.
    deleted = {one: list(job.client.list_deleted(stream, shard=one)) for one in shards}
    info = job.client.get_stream(stream)
    states = info.shards or (info.state,)
    return ServerView({one: states[one] for one in shards}, deleted)


def _range_tasks(begun: Audit) -> "list[RangeTask]":
    """Cut the range of each shard where the plan does, at the borders of checksums."""
    from contrail_pipeline.audit.digest import CHUNK  # noqa: PLC0415
    from contrail_pipeline.audit.work import RangeTask  # noqa: PLC0415
    from contrail_spark.options import parse_options  # noqa: PLC0415

    options = parse_options(_options(begun.job, begun.plan.stream))
    tasks = []
    for bounds in begun.plan.shards:
        splits = [one.to_seq + 1 for one in begun.plan.splits if one.shard == bounds.shard]
        cuts = {one - one % CHUNK for one in splits}
        starts = sorted({bounds.first_seq, *(cut for cut in cuts if cut > bounds.first_seq)})
        ends = [*(start - 1 for start in starts[1:]), bounds.last_seq]
        for start, end in zip(starts, ends, strict=True):
            if start <= end:
                task = RangeTask(options, begun.plan, bounds.shard, start, end, begun.nodes)
                tasks.append(_with_lake(begun, task))
    return tasks


def _with_lake(begun: Audit, task: "RangeTask") -> "RangeTask":
    from contrail_pipeline.audit.lakes import range_of  # noqa: PLC0415

    if begun.lake is None or begun.state is None:
        return task
    end = min(task.to_seq, begun.state.archived_through(task.shard))
    if end < task.from_seq:
        return task
    archived = range_of(begun.lake, begun.state, task.shard, task.from_seq, end)
    return replace(task, archived=archived)


def _announce(begun: Audit, tasks: "Sequence[RangeTask]") -> None:
    sequences = sum(task.to_seq - task.from_seq + 1 for task in tasks)
    files = 0 if begun.state is None else len(begun.state.files)
    copies = f", and compare the copies on {', '.join(begun.nodes)}" if begun.nodes else ""
    archive = f", and compare them with {files:,} files" if begun.state is not None else ""
    text = (
        f"Would read {sequences:,} sequences of stream {begun.info.name} in {len(tasks):,} ranges"
        f"{copies}{archive}"
    )
    begun.job.done(
        text,
        {
            "dry_run": True,
            "stream": begun.info.name,
            "sequences": sequences,
            "ranges": len(tasks),
            "replicas": begun.nodes,
            "lake_files": files,
        },
    )


def _run(
    job: Job, spark: "SparkSession", what: str, work: Callable[[Any], Any], tasks: Sequence[Any]
) -> list[Any]:
    from contrail_pipeline.tasks import run_tasks  # noqa: PLC0415

    if not tasks:
        return []
    with job.progress(what, len(tasks)) as advance:
        return run_tasks(spark, tasks, work, advance)


def _audit_range() -> "Callable[[RangeTask], RangeReport]":
    from contrail_pipeline.audit.work import audit_range  # noqa: PLC0415

    return audit_range


def _check_lake(begun: Audit, spark: "SparkSession") -> "list[Finding]":
    """Check the files of the lake, and the messages that the stream no longer has."""
    from contrail_pipeline.audit.lakes import ranges  # noqa: PLC0415
    from contrail_pipeline.audit.work import FileTask, check_archived, check_file  # noqa: PLC0415

    lake, state = begun.lake, begun.state
    if lake is None or state is None:
        return []
    entries = state.live_files()
    tasks = [FileTask(lake.root, entry) for entry in entries]
    checked = _run(begun.job, spark, "Files", check_file, tasks)
    found = {one.path: finding for one, finding in zip(entries, checked, strict=True) if finding}
    if found:
        # A compaction or an erasure may have replaced files meanwhile.
        kept = lake.state().files
        found = {path: finding for path, finding in found.items() if path in kept}
    firsts = {one.shard: one.first_seq for one in begun.plan.shards}
    older = [
        part
        for shard in sorted(state.shards)
        for part in ranges(
            lake, state, shard, 1, min(firsts.get(shard, 1) - 1, state.archived_through(shard))
        )
        if part.entries
    ]
    reports = _run(begun.job, spark, "Archive", check_archived, older)
    return [
        *found.values(),
        *(
            one
            for report in reports
            for one in report.findings
            if one.message.split()[0] not in found
        ),
    ]


def _without_absent(
    tasks: "Sequence[RangeTask]",
) -> "tuple[list[RangeTask], list[Finding]]":
    """Leave out copies that no node shows now, with a finding for each of them."""
    from contrail_pipeline.audit.replicas import applied_index, unreadable  # noqa: PLC0415
    from contrail_spark.errors import ContrailSparkError  # noqa: PLC0415

    absent: dict[tuple[int, str], Finding] = {}
    for shard in {task.shard: task for task in tasks}.values():
        for node in shard.nodes:
            try:
                applied_index(shard.options, shard.shard, node)
            except ContrailSparkError as error:
                absent[shard.shard, node] = unreadable(node, shard.shard, error)
    left = [
        replace(task, nodes=tuple(node for node in task.nodes if (task.shard, node) not in absent))
        for task in tasks
    ]
    return left, list(absent.values())


def _judged(begun: Audit, reports: "Sequence[RangeReport]") -> "list[ShardResult]":
    from contrail_pipeline.audit.verdict import judge  # noqa: PLC0415

    for report in reports:
        if report.error is not None:
            raise Failed(report.error)
    shards = sorted({report.shard for report in reports})
    after = _server_view(begun.job, begun.info.name, shards)
    return [
        judge(shard, [one for one in reports if one.shard == shard], begun.before, after)
        for shard in shards
    ]


def _repeated_ids(begun: Audit, spark: "SparkSession") -> "list[Finding]":
    from contrail_common.timeunits import parse_duration  # noqa: PLC0415
    from contrail_pipeline.audit.repeated import repeated_ids  # noqa: PLC0415

    window = parse_duration(str(begun.info.config["duplicate_window"]))
    options = begun.job.server_options(begun.info.name)
    return repeated_ids(spark, options, window)


def _report(
    begun: Audit,
    reports: "Sequence[RangeReport]",
    results: "Sequence[ShardResult]",
    findings: "Sequence[Finding]",
) -> None:
    messages = sum(one.messages for one in results)
    lake_files = 0 if begun.state is None else len(begun.state.files)
    summary = {
        "stream": begun.info.name,
        "incarnation": begun.plan.incarnation,
        "ok": not findings,
        "messages": messages,
        "bytes": sum(one.bytes for one in results),
        "replicas": begun.nodes,
        "lake_files": lake_files,
        "findings": len(findings),
    }
    if begun.job.as_json:
        for report in reports:
            for digest in report.digests:
                show.json_line(
                    {
                        "range": f"{report.shard}:{digest.from_seq}..{digest.to_seq}",
                        "messages": digest.messages,
                        "sha256": digest.sha256,
                    }
                )
        for result in results:
            show.json_line(result.document())
        for finding in findings:
            show.json_line(finding.document())
        show.json_line(summary)
        return
    _tables(results, findings)
    copies = f", {len(begun.nodes)} replicas" if begun.nodes else ""
    files = f", {units.counted(lake_files, 'file')}" if begun.state is not None else ""
    verdict = units.counted(len(findings), "finding") if findings else "nothing is wrong"
    counted = units.counted(messages, "message")
    text = f"Stream {begun.info.name}: {counted}{copies}{files}: {verdict}"
    begun.job.done(text, summary)


def _tables(results: "Sequence[ShardResult]", findings: "Sequence[Finding]") -> None:
    from contrail_pipeline.audit.verdict import moment  # noqa: PLC0415

    show.table(
        ("Shard", "Sequences", "Messages", "Deleted", "Bytes", "First", "Last", "SHA-256"),
        (
            (
                one.shard,
                f"{one.from_seq}..{one.to_seq}",
                one.messages,
                one.deleted + one.removed,
                units.size(one.bytes),
                moment(one.first_time) or "",
                moment(one.last_time) or "",
                one.sha256[:_DIGEST_SHOWN],
            )
            for one in results
        ),
    )
    if findings:
        show.table(("Source", "Finding"), ((one.source, one.message) for one in findings))
