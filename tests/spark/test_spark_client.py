"""Reading over HTTP: streaming, resuming, retrying, refusing - against a server on loopback."""

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pyarrow as pa
import pytest

from contrail_spark import client as client_module
from contrail_spark.client import ReplayClient
from contrail_spark.errors import (
    DataLossError,
    ProtocolError,
    ServerRefusedError,
    StreamChangedError,
    UnavailableError,
)
from contrail_spark.options import parse_options
from contrail_spark.plan import Split
from contrail_spark.schema import COLUMNS
from contrail_spark.transport import RETRY_AFTER_MAX_S
from tests.spark.replay_server import Cut, Fault, Garble, Refuse, ReplayServer, Retype

WHOLE = Split(0, 1, 100, 100, 10_000)


class Reader:
    """A client whose pauses are recorded, not slept."""

    def __init__(self, server: ReplayServer, **options: str) -> None:
        self.pauses: list[float] = []
        given = {"url": server.url, "stream": "FLIGHTS", "fetchRetries": "3", **options}
        self.client = ReplayClient(parse_options(given), sleep=self.pauses.append)

    def rows(
        self, split: Split = WHOLE, columns: tuple[str, ...] = tuple(COLUMNS)
    ) -> list[dict[str, object]]:
        """Everything that one split yields, as the server's own rows."""
        batches = list(self.client.read(self.client.plan(), split, columns))
        schema = pa.schema([(name, COLUMNS[name].arrow) for name in columns])
        found = pa.Table.from_batches([batch.select(list(columns)) for batch in batches], schema)
        if "time" in columns:
            position = columns.index("time")
            found = found.set_column(position, "time", found["time"].cast(pa.int64()))
        rows: list[dict[str, object]] = found.to_pylist()
        return rows


def test_a_split_is_read_to_the_last_row_in_every_column(server: ReplayServer) -> None:
    assert Reader(server).rows() == server.rows(0, 1, 100)


def test_a_split_is_clipped_to_its_range(server: ReplayServer) -> None:
    assert Reader(server).rows(Split(0, 17, 55, 39, 0)) == server.rows(0, 17, 55)


def test_deleted_messages_inside_the_range_are_no_loss(server: ReplayServer) -> None:
    server.holes = {1, 50, 51, 100}
    rows = Reader(server).rows()
    assert len(rows) == 96
    assert rows == server.rows(0, 1, 100)


def test_a_range_without_any_message_reads_as_nothing(server: ReplayServer) -> None:
    server.holes = set(range(1, 101))
    assert Reader(server).rows() == []


def test_a_subject_filter_is_the_servers_work(server: ReplayServer) -> None:
    rows = Reader(server, subject="flights.JFK.LAX.*").rows()
    assert rows == server.rows(0, 1, 100, "flights.JFK.LAX.*")
    assert {query["subject"] for query in server.asked("/replay")} == {"flights.JFK.LAX.*"}


def test_several_filters_are_one_request(server: ReplayServer) -> None:
    rows = Reader(server, subject="flights.EWR.> flights.*.*.DL").rows()
    assert rows == server.rows(0, 1, 100, "flights.EWR.> flights.JFK.LAX.DL")
    assert 0 < len(rows) < 100
    assert len(server.asked("/replay")) == 1


def test_batches_are_yielded_while_the_body_still_arrives(server: ReplayServer) -> None:
    server.faults.extend([Cut(3), Refuse(404, "gone")])
    reader = Reader(server)
    batches = reader.client.read(reader.client.plan(), WHOLE, ("seq",))
    assert [next(batches).num_rows for _ in range(3)] == [10, 10, 10]
    with pytest.raises(ServerRefusedError):
        next(batches)


@pytest.mark.parametrize(
    "cut",
    [
        Cut(0),
        Cut(0, clean=True),
        Cut(4),
        Cut(4, clean=True),
        Cut(4, extra=3),
        Cut(4, extra=60, clean=True),
        Cut(4, extra=400),
        Cut(10, clean=True),
    ],
)
def test_a_cut_body_is_resumed_after_the_last_whole_batch(server: ReplayServer, cut: Cut) -> None:
    server.faults.append(cut)
    assert Reader(server).rows() == server.rows(0, 1, 100)
    starts = [query["from_seq"] for query in server.asked("/replay")]
    assert starts == (["1"] if cut.batches == 10 else ["1", str(10 * cut.batches + 1)])


def test_a_body_cut_again_and_again_ends_as_long_as_it_advances(server: ReplayServer) -> None:
    server.faults.extend([Cut(1), Cut(1), Cut(1), Cut(1), Cut(1), Cut(1)])
    assert Reader(server, fetchRetries="1").rows() == server.rows(0, 1, 100)


def test_a_body_cut_without_an_advance_ends_in_an_error(server: ReplayServer) -> None:
    server.faults.extend([Cut(2), *[Cut(0, clean=True)] * 10])
    with pytest.raises(UnavailableError, match=r"sequences 21\.\.100 .*\(4 attempts\)"):
        Reader(server).rows()


def test_a_body_cut_where_arrow_takes_it_for_the_end_is_an_error(server: ReplayServer) -> None:
    server.faults.append(Cut(5, clean=True))
    with pytest.raises(UnavailableError, match="ended without its end mark"):
        Reader(server, fetchRetries="0").rows()


def test_a_body_cut_after_arrows_end_mark_is_complete(server: ReplayServer) -> None:
    server.holes = {100}
    server.faults.append(Cut(10, extra=8))
    reader = Reader(server)
    assert reader.rows() == server.rows(0, 1, 100)
    assert len(server.asked("/replay")) == 1


def test_a_batch_with_values_outside_of_its_buffers_is_read_again(server: ReplayServer) -> None:
    """Spark's worker would crash on it."""
    texts, seqs = pa.array(list("nine char")), pa.array(range(1, 10), pa.int64())
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"subject": texts, "seq": seqs})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    ends = struct.pack("<2i", 8, 9), struct.pack("<2i", 8, 1 << 30)
    server.faults.append(Garble(sink.getvalue().to_pybytes().replace(*ends)))
    rows = Reader(server).rows(Split(0, 1, 9, 0, 0), ("subject", "seq"))
    assert [row["seq"] for row in rows] == list(range(1, 10))
    assert len(server.asked("/replay")) == 2


def test_a_read_outlives_a_server_that_is_away_for_seconds(server: ReplayServer) -> None:
    pauses: list[float] = []
    options = parse_options({"url": server.url, "stream": "FLIGHTS"})
    client = ReplayClient(options, sleep=pauses.append)
    plan = client.plan()
    server.faults.extend([Refuse(503, "not_ready")] * 10)
    assert sum(batch.num_rows for batch in client.read(plan, WHOLE, ("seq",))) == 100
    assert sum(pauses) > 10


def test_backoff_grows_from_one_failed_attempt_to_the_next(server: ReplayServer) -> None:
    server.faults.extend([Refuse(503, "range_not_applied")] * 3)
    reader = Reader(server)
    assert reader.rows() == server.rows(0, 1, 100)
    bounds = [(0.05, 0.1), (0.1, 0.2), (0.2, 0.4)]
    assert all(
        low <= pause <= high for pause, (low, high) in zip(reader.pauses, bounds, strict=True)
    )


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_in_seconds_is_waited_for(server: ReplayServer, status: int) -> None:
    server.faults.append(Refuse(status, "overloaded", {"Retry-After": "7"}))
    reader = Reader(server)
    assert reader.rows() == server.rows(0, 1, 100)
    assert reader.pauses == [7.0]


def test_retry_after_as_a_date_is_waited_for(server: ReplayServer) -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    server.faults.append(Refuse(503, "overloaded", {"Retry-After": later}))
    reader = Reader(server)
    reader.rows()
    assert 20 < reader.pauses[0] <= 30


@pytest.mark.parametrize(("value", "waited"), [("86400", RETRY_AFTER_MAX_S), ("soon", 0.1)])
def test_an_unreasonable_retry_after_does_not_stop_the_read(
    server: ReplayServer, value: str, waited: float
) -> None:
    server.faults.append(Refuse(503, "overloaded", {"Retry-After": value}))
    reader = Reader(server)
    reader.rows()
    assert reader.pauses[0] <= waited


def test_overload_without_end_becomes_an_error_with_the_servers_words(
    server: ReplayServer,
) -> None:
    server.faults.extend([Refuse(503, "overloaded")] * 10)
    with pytest.raises(UnavailableError, match=r"503 overloaded: told overloaded \(4 attempts\)"):
        Reader(server).rows()


def test_a_503_that_no_retry_mends_is_not_retried(server: ReplayServer) -> None:
    server.faults.append(Refuse(503, "data_lost", retryable=False))
    with pytest.raises(ServerRefusedError, match="data_lost"):
        Reader(server).rows()
    assert len(server.asked("/replay")) == 1


def test_a_stream_created_again_since_the_plan_is_a_clear_error(server: ReplayServer) -> None:
    reader = Reader(server)
    plan = reader.client.plan()
    server.incarnation = "second"
    with pytest.raises(StreamChangedError, match=r"re-created .* load it again") as refused:
        list(reader.client.read(plan, WHOLE, ("seq",)))
    assert (refused.value.status, refused.value.name) == (409, "incarnation_changed")


@pytest.mark.parametrize("first", [2, 31, 100, 101, 200])
def test_messages_gone_before_the_read_are_an_error_that_names_them(
    server: ReplayServer, first: int
) -> None:
    server.first_seq, server.rows_per_shard = first, 300
    with pytest.raises(DataLossError) as lost:
        Reader(server).rows()
    assert str(lost.value) == (
        f"stream FLIGHTS shard 0: sequences 1..{min(first, 101) - 1} were removed before they "
        'were read. To read what is left, use .option("failOnDataLoss", "false")'
    )


@pytest.mark.parametrize("first", [2, 31, 100, 101])
def test_without_fail_on_data_loss_lost_messages_are_skipped_and_logged(
    server: ReplayServer, first: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.first_seq = first
    assert Reader(server, failOnDataLoss="false").rows() == server.rows(0, first, 100)
    assert f"sequences 1..{first - 1} were removed before they were read" in caplog.text


@pytest.mark.parametrize("kept", [22, 56, 101])
def test_retention_that_overtakes_a_read_loses_what_was_not_read(
    server: ReplayServer, kept: int
) -> None:
    server.faults.append(Cut(2, first_seq=kept))
    reader = Reader(server, failOnDataLoss="false", fetchRetries="1")
    assert reader.rows() == server.rows(0, 1, 20) + server.rows(0, kept, 100)
    server.first_seq = 1
    server.faults.append(Cut(2, first_seq=kept))
    with pytest.raises(DataLossError, match=rf"sequences 21\.\.{kept - 1} were removed"):
        Reader(server).rows()


@pytest.mark.parametrize("last", [0, 9, 99])
def test_an_end_that_the_server_has_lost_is_named_or_skipped(
    server: ReplayServer, last: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As from an older disk; Spark may have planned or logged the range before."""
    server.rows_per_shard = last
    lost = f"sequences {last + 1}..100 were lost by the server before they were read"
    with pytest.raises(DataLossError, match=lost):
        Reader(server).rows()
    reader = Reader(server, failOnDataLoss="false", consistency="any")
    assert reader.rows() == server.rows(0, 1, last)
    assert lost in caplog.text
    assert reader.pauses == []


def test_what_was_removed_is_told_but_a_lost_end_is_an_error(server: ReplayServer) -> None:
    lost: list[tuple[int, int]] = []
    options = parse_options({"url": server.url, "stream": "FLIGHTS"})
    client = ReplayClient(options, lost=lambda *run: lost.append(run))
    server.first_seq = 21
    batches = list(client.read(client.plan(), WHOLE, ("seq",)))
    assert sum(batch.num_rows for batch in batches) == 80
    assert lost == [(1, 20)]
    plan, server.rows_per_shard = client.plan(), 90
    with pytest.raises(DataLossError, match=r"sequences 1\.\.20 and 91\.\.100 were"):
        list(client.read(plan, WHOLE, ("seq",)))


def test_both_ends_of_a_range_may_be_gone(server: ReplayServer) -> None:
    server.first_seq, server.rows_per_shard = 21, 90
    with pytest.raises(DataLossError, match=r"sequences 1\.\.20 and 91\.\.100 were removed"):
        Reader(server).rows()
    assert Reader(server, failOnDataLoss="false").rows() == server.rows(0, 21, 90)


def test_retention_that_follows_close_behind_a_read_loses_nothing(server: ReplayServer) -> None:
    server.faults.append(Cut(2, first_seq=21))
    assert Reader(server).rows() == server.rows(0, 1, 100)


def test_the_leader_decides_what_was_removed(server: ReplayServer) -> None:
    server.faults.append(Refuse(410, "range_gone"))
    reader = Reader(server, consistency="any")
    assert reader.rows() == server.rows(0, 1, 100)
    assert len(reader.pauses) == 1
    assert [query.get("consistency") for query in server.asked("/plan")] == ["any", None]


def test_a_stream_created_again_is_not_mistaken_for_loss(server: ReplayServer) -> None:
    reader = Reader(server, failOnDataLoss="false")
    plan = reader.client.plan()
    server.faults.append(Refuse(410, "range_gone"))
    server.incarnation = "second"
    with pytest.raises(StreamChangedError, match="load it again"):
        list(reader.client.read(plan, WHOLE, ("seq",)))


def test_a_replica_that_is_behind_the_plan_gives_way_to_the_leader(server: ReplayServer) -> None:
    behind = Refuse(503, "range_not_applied", {"Retry-After": "1"})
    server.faults.extend([behind, Cut(2), behind, behind])
    reader = Reader(server, consistency="any")
    assert reader.rows() == server.rows(0, 1, 100)
    asked = [query["consistency"] for query in server.asked("/replay")]
    assert asked == ["any", "leader", "any", "leader", "any"]
    assert [pause < 1 for pause in reader.pauses] == [True, False]


def test_any_replica_is_asked_for_the_plan_and_the_parts(server: ReplayServer) -> None:
    Reader(server, consistency="Any").rows()
    asked = [*server.asked("/replay/plan"), *server.asked("/replay")]
    assert {query["consistency"] for query in asked} == {"any"}


def test_an_unknown_stream_is_refused_by_name(server: ReplayServer) -> None:
    with pytest.raises(ServerRefusedError, match="stream NONE: 404 stream_not_found"):
        Reader(server, stream="NONE").rows()


def test_a_server_that_is_not_there_is_named_after_the_retries(server: ReplayServer) -> None:
    reader = Reader(server)
    server.close()
    with pytest.raises(UnavailableError, match=r"http://127\.0\.0\.1:\d+: connection refused"):
        reader.client.plan()
    assert len(reader.pauses) == 3


def test_a_plan_is_retried_like_a_read(server: ReplayServer) -> None:
    server.plan_faults.append(Refuse(503, "not_ready", {"Retry-After": "2"}))
    reader = Reader(server)
    assert reader.client.plan().splits
    assert reader.pauses == [2.0]


def test_a_refused_range_of_a_server_that_names_no_shards(server: ReplayServer) -> None:
    """Servers before 0.3 have no `shards` in a plan."""
    old = b'{"stream": "FLIGHTS", "incarnation": "first", "splits": []}'
    server.plan_faults.extend([Refuse(422, "invalid_field"), Garble(old, "application/json")])
    with pytest.raises(ServerRefusedError, match="422 invalid_field: told invalid_field"):
        Reader(server, startingSequence="2").client.plan()


@pytest.mark.parametrize("body", [b"{", b"\xff", b""])
def test_a_plan_that_is_not_json_ends_in_an_error(server: ReplayServer, body: bytes) -> None:
    server.plan_faults.extend([Garble(body, "application/json")] * 4)
    with pytest.raises(UnavailableError, match="the answer is not JSON"):
        Reader(server).client.plan()


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (Garble(b"<html>", "text/html"), "arrow.stream, but received text/html"),
        (Garble(b"not arrow at all"), "announced 544501614 bytes in one part"),
        (Retype("time", pa.timestamp("ns", tz="UTC")), r"column time as timestamp\[ns"),
    ],
)
def test_an_answer_outside_the_contract_is_a_protocol_error(
    server: ReplayServer, fault: Fault, sentence: str
) -> None:
    server.faults.append(fault)
    with pytest.raises(ProtocolError, match=sentence):
        Reader(server).rows()


@pytest.mark.parametrize("body", [b"", b"\xff\xff\xff\xff\x10\x00\x00\x00"])
def test_a_body_that_is_not_arrow_ends_in_an_error(server: ReplayServer, body: bytes) -> None:
    server.faults.extend([Garble(body)] * 4)
    with pytest.raises(UnavailableError, match="4 attempts"):
        Reader(server).rows()


def test_a_part_of_absurd_size_is_refused_before_memory_is_taken(
    server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "ARROW_PART_BYTES_MAX", 64)
    with pytest.raises(ProtocolError, match="bytes in one part of a record batch"):
        Reader(server).rows()


def test_sequences_outside_the_range_are_a_protocol_error(
    server: ReplayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Callable[[dict[str, str]], object] = server.batches
    monkeypatch.setattr(server, "batches", lambda query: original({**query, "from_seq": "1"}))
    with pytest.raises(ProtocolError, match=r"1\.\.10 instead of 20\.\.100"):
        Reader(server).rows(Split(0, 20, 100, 0, 0))


def test_the_token_is_sent_and_never_shown(server: ReplayServer) -> None:
    server.token = "right"
    assert Reader(server, token="right").rows() == server.rows(0, 1, 100)
    with pytest.raises(ServerRefusedError, match="401 unauthenticated") as refused:
        Reader(server, token="wrong-and-secret").rows()
    assert "wrong-and-secret" not in str(refused.value)


def test_a_reader_that_stops_early_closes_its_connection(server: ReplayServer) -> None:
    reader = Reader(server)
    batches = reader.client.read(reader.client.plan(), WHOLE, ("seq",))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert reader.pauses == []
