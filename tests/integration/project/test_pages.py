"""The shell blocks of the documentation run in order, each page in a fresh project, and print what the page shows.

`tests.support.page_reader.NOT_RUN` lists the blocks that do not run here. The short run has the quickstart and the tutorials, on the tests'
servers.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import yaml
from confluent_kafka import Consumer, TopicPartition
from tests.support.documented import blocks, snippets
from tests.support.installed import Installed
from tests.support.kafka_topics import Topics
from tests.support.page_reader import NOT_RUN, PageReader, Script, reason
from tests.support.scenario import Scenario
from tests.support.waiting import until

from tidemark import migrations
from tidemark.connections import BOOTSTRAP_SERVERS, DATABASE_URL
from tidemark.jvm.jars import spark_jars
from tidemark.local import LocalStack
from tidemark.local.airflow import LocalAirflow

AS_IT_STANDS: Mapping[str, str] = {}
MAKE = 'make .venv/.ready && export PATH="$PWD/.venv/bin:$PATH"'
ON_THE_TESTS_SERVERS = {MAKE: ":", 'tidemark local up && eval "$(tidemark local env)"': ":"}


def rows_of(url: str, statement: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(psycopg2.connect(url)) as connection, connection.cursor() as cur:
        cur.execute(statement)
        return cur.fetchall()


# The quickstart and the tutorials, which continue it


@dataclass(frozen=True)
class Cities:
    """A newcomer with the quickstart's consumer: on the servers of the tests, or on those that the README starts, then with its Airflow."""

    reader: PageReader
    sql: Callable[[str], list[tuple[Any, ...]]]
    topics: Topics | None = None

    def adopt(self, topic: str) -> None:
        if self.topics:
            self.topics.adopt([topic])

    def rows(self) -> list[tuple[Any, ...]]:
        return self.sql("SELECT name, population FROM public.cities ORDER BY name")

    def add_to_the_file(self, lines: str) -> None:
        file = self.reader.consumer("cities")
        file.write_text(file.read_text() + lines)

    def quickstart(self) -> Script:
        """From an empty database to validated rows."""
        printed = yield "tidemark init ../lake", ON_THE_TESTS_SERVERS if self.topics else {MAKE: ":"}
        assert [line for line in printed.splitlines() if line.startswith("applied")] == [f"applied {name}" for name in migrations.known()]
        yield "create_topics", AS_IT_STANDS
        self.adopt("cities")
        yield "tidemark try cities", AS_IT_STANDS
        yield "tidemark consume cities", AS_IT_STANDS
        printed = yield "tidemark validate cities", AS_IT_STANDS
        shown = [line.split(" | ") for line in printed.splitlines() if line.startswith(" ")]
        assert sorted(line[0].strip() for line in shown[1:]) == ["Rome", "Ulm"]
        assert self.sql("SELECT error_type FROM tidemark.failed_record") == [("Undecodable",)]

    def readme(self) -> Script:
        yield from self.quickstart()
        yield "tidemark rewind plan cities", AS_IT_STANDS
        self.add_to_the_file("retry: {delays: [5m, 30m, 1h]}\n")
        yield "tidemark redrive plan cities", {"TimeoutError": "Undecodable"}

    def retries(self) -> Script:
        page = "docs/tutorials/retries.md"
        self.add_to_the_file(snippets(page, "yaml")[0])
        self.reader.transform("cities").write_text(snippets(page, "python")[0])
        yield "tidemark consume cities", AS_IT_STANDS
        self.adopt("cities.retry.5s")
        until(lambda: self.sql("SELECT 1 FROM tidemark.failed_record WHERE due_at <= clock_timestamp()"), within_s=60)
        yield "tidemark retries drain cities", AS_IT_STANDS
        self.adopt("cities.failed")
        yield "tidemark retries edit cities 2", AS_IT_STANDS
        yield "tidemark retries relay cities", AS_IT_STANDS
        assert self.rows() == [("Bonn", 9), ("Rome", 2748109), ("Ulm", 128928)]

    def rewind(self) -> Script:
        before, transform = self.rows(), self.reader.transform("cities")
        transform.write_text(transform.read_text().replace('city["name"],', 'city["name"].upper(),'))
        yield "tidemark rewind plan cities", AS_IT_STANDS
        yield "tidemark rewind apply 1", AS_IT_STANDS
        assert self.rows() == []
        yield "tidemark rewind verify 1", AS_IT_STANDS
        yield "tidemark rewind undo 1", AS_IT_STANDS
        assert self.rows() == before

    def group(self) -> Script:
        """With fewer records, and on the servers of the tests with a run in place of Airflow."""
        before, records = len(self.rows()), 100 if self.topics else 200_000
        self.add_to_the_file(snippets("docs/tutorials/group.md", "yaml")[0])
        yield "tidemark assign cities", AS_IT_STANDS
        yield "range(4_000_000)", {"4_000_000": str(records)}
        if self.topics:
            yield "airflow up", {"tidemark local airflow up": r"printf 'url=http://127.0.0.1:0\nuser=admin\npassword=none\n'"}
            self.reader.run("tidemark consume cities")
        else:
            yield "airflow up", AS_IT_STANDS
            self.runs_in_airflow()
        yield "tidemark groups describe cities", AS_IT_STANDS
        yield "tidemark audit cities", AS_IT_STANDS
        assert len(self.rows()) == before + records

    def read_all(self) -> None:
        self.reader.read("README.md", self.quickstart(), whole=False)
        self.reader.read("docs/tutorials/retries.md", self.retries())
        self.reader.read("docs/tutorials/rewind.md", self.rewind())
        self.reader.read("docs/tutorials/group.md", self.group())

    def runs_in_airflow(self) -> None:
        with LocalAirflow.at(self.reader.project / ".tidemark" / "airflow").client() as airflow:
            airflow.wait_for_dag("consume__cities")
            airflow.unpause("consume__cities")
            during = until(
                lambda: (shown := self.reader.run("tidemark groups describe cities")[0]).count("consume__cities/") == 2 and shown
            )
            assert "cities: Stable" in during
            until(lambda: {run["state"] for run in airflow.runs("consume__cities")} == {"success"})
            airflow.pause("consume__cities")


@pytest.fixture
def beside_the_tests_servers(installed: Installed, scenario: Scenario, tmp_path: Path) -> PageReader:
    servers = {name: value for name, value in scenario.env().items() if name in (DATABASE_URL, BOOTSTRAP_SERVERS)}
    return PageReader(installed, tmp_path / "checkout", servers)


@pytest.fixture
def with_own_servers(installed: Installed) -> Iterator[PageReader]:
    with tempfile.TemporaryDirectory(prefix="tidemark-pages-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # if root runs this, Postgres runs as another user
        reader = PageReader(installed, Path(folder) / "checkout", {})
        try:
            yield reader
        finally:
            reader.run(snippets("template/README.md", "sh")[-1])


def test_quickstart_and_tutorials_run_as_they_stand_there(beside_the_tests_servers: PageReader, scenario: Scenario) -> None:
    scenario.sql("DROP SCHEMA tidemark, tidemark_staging, tidemark_archive CASCADE")
    Cities(beside_the_tests_servers, scenario.sql, scenario.topics).read_all()


@pytest.mark.thorough
def test_tutorials_run_on_the_servers_and_the_airflow_that_the_pages_start(with_own_servers: PageReader) -> None:
    stack = LocalStack(with_own_servers.project / ".tidemark")
    cities = Cities(with_own_servers, lambda statement: rows_of(stack.env()[DATABASE_URL], statement))
    cities.read_all()


@pytest.mark.thorough
def test_readme_runs_to_its_end(beside_the_tests_servers: PageReader, scenario: Scenario) -> None:
    scenario.sql("DROP SCHEMA tidemark, tidemark_staging, tidemark_archive CASCADE")
    beside_the_tests_servers.read("README.md", Cities(beside_the_tests_servers, scenario.sql, scenario.topics).readme())


# The guides


class Guide:
    """A user whose servers have topics and tables already, on the servers of the tests."""

    def __init__(self, reader: PageReader, scenario: Scenario) -> None:
        self.reader, self.topics, self.sql = reader, scenario.topics, scenario.sql
        self.here = {"localhost:9092": scenario.topics.servers}
        reader.run("tidemark init ../lake && cd ../lake")

    def topic(self, name: str, values: Sequence[Mapping[str, Any]], *, partitions: int = 1, key: str | None = None) -> None:
        """Has these values in each partition."""
        self.topics.create(partitions, name=name)
        for partition in range(partitions):
            self.topics.produce(name, [json.dumps(value) for value in values], partition=partition, key=key)

    def file(self, name: str, *topics: str, **keys: Any) -> None:
        """Writes the consumer's file."""
        source = {} if "transform" in keys else {"format": {"value": "json"}}
        self.reader.consumer(name).write_text(yaml.safe_dump({"topics": list(topics), "sink": {"table": f"public.{name}"}} | source | keys))

    def consumer(self, name: str, topic: str, **keys: Any) -> None:
        """Writes the file, and creates the table."""
        self.file(name, topic, **keys)
        self.reader.run(f"tidemark sink ddl {name} | tidemark local psql")

    def has_orders(self) -> None:
        """The topic `orders`, with 10 records in each of two partitions."""
        self.topic("orders", [{"id": number} for number in range(10)], partitions=2)

    def committed(self, group: str, offsets: Mapping[int, int]) -> None:
        """Another application has committed these offsets of `orders` to Kafka, and has stopped."""
        settings = {"bootstrap.servers": self.topics.servers, "group.id": group, "enable.auto.commit": False}
        with contextlib.closing(Consumer(settings)) as old:
            old.commit(offsets=[TopicPartition("orders", *at) for at in offsets.items()], asynchronous=False)

    def has_read_the_rest(self) -> bool:
        """From offset 7 of one partition and offset 4 of the other."""
        counts = "SELECT kafka_partition, min(kafka_offset), count(*) FROM public.orders GROUP BY 1 ORDER BY 1"
        return self.sql(counts) == [(0, 7, 3), (1, 4, 6)]


def from_kafka_connect(guide: Guide) -> Script:
    guide.has_orders()
    guide.consumer("orders", "orders")
    guide.committed("connect-orders-sink", {0: 7, 1: 4})
    yield "tidemark groups adopt orders", AS_IT_STANDS
    assert guide.has_read_the_rest()


def from_a_hand_written_loop(guide: Guide) -> Script:
    """The loop's offsets are in a table of its own."""
    guide.has_orders()
    guide.consumer("orders", "orders")
    guide.sql("CREATE TABLE public.mine AS SELECT * FROM (VALUES ('orders', 0, 7), ('orders', 1, 4)) AS offsets (topic, part, next_offset)")
    yield "next_offset", guide.here | {"psql -c": "tidemark local psql -c"}
    yield "tidemark groups adopt orders", AS_IT_STANDS
    assert guide.has_read_the_rest()


STREAM = """
import sys
from pyspark.sql import SparkSession
servers, jars = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.jars", jars).config("spark.ui.enabled", "false").getOrCreate()
source = {"kafka.bootstrap.servers": servers, "subscribe": "orders", "startingOffsets": '{"orders": {"0": 0, "1": 0}}'}
records = spark.readStream.format("kafka").options(**source).load()
query = records.writeStream.foreachBatch(lambda batch, number: None).option("checkpointLocation", "checkpoint")
query.trigger(availableNow=True).start().awaitTermination()
"""


def from_foreach_batch(guide: Guide) -> Script:
    """The query has read all that was there when it stopped."""
    guide.topic("orders", [{"id": number} for number in range(7)], partitions=2)
    jars = ",".join(map(str, spark_jars()))
    command = [sys.executable, "-c", STREAM, guide.topics.servers, jars]
    subprocess.run(command, cwd=guide.reader.project, check=True, timeout=240)
    guide.topics.produce("orders", ['{"id": 7}'], partition=1)
    guide.consumer("orders", "orders")
    yield "tidemark groups adopt orders", guide.here | {"offsets/41": "offsets/0"}
    assert guide.sql("SELECT kafka_partition, kafka_offset FROM public.orders") == [(1, 7)]


def consumers(guide: Guide) -> Script:
    for name, partitions in (("orders", 3), ("orders-eu", 5), ("clicks", 6)):
        guide.topic(name, [{"customer_id": 42, "item": "tea"}], partitions=partitions)
    yield "tidemark consumers new orders", AS_IT_STANDS

    file = guide.reader.consumer("orders")
    file.write_text(file.read_text() + "mirror: true\n")
    guide.reader.run("tidemark consume orders")
    printed = yield "--describe", guide.here
    assert [line.split()[:6] for line in printed.splitlines() if line.startswith("orders")] == [
        ["orders", "orders", str(partition), "1", "1", "0"] for partition in range(3)
    ]

    guide.sql("DROP SCHEMA tidemark, tidemark_staging, tidemark_archive, shop CASCADE")
    guide.reader.run("tidemark migrate")
    guide.consumer("orders", "orders")
    guide.committed("orders-app", {2: 1})
    yield "tidemark groups adopt orders", AS_IT_STANDS
    assert guide.sql("SELECT kafka_partition FROM public.orders ORDER BY 1") == [(0,), (1,)]

    guide.file("orders", "orders", "orders-eu")
    yield "--partition orders-eu:4", AS_IT_STANDS
    assert guide.sql("SELECT kafka_partition FROM public.orders ORDER BY 1") == [(0,), (1,), (4,)]

    guide.file("orders", "orders", "clicks")
    printed = yield "tidemark pause orders", AS_IT_STANDS
    assert "10m" in printed


DEPARTURES = """
from typing import TypedDict

from tidemark.transform import Record


class Departure(TypedDict):
    flight: int
    origin: str


def transform(record: Record) -> Departure:
    flight = record.json()
    if flight["origin"] == "XXX":
        raise TimeoutError("the service of airports does not answer")
    return {"flight": flight["flight"], "origin": flight["airport"]}
"""


def retries(guide: Guide) -> Script:
    """One record has no airport, and the service does not answer for two."""
    flights = [{"flight": 1, "origin": "XXX"}, {"flight": 2, "origin": "XXX"}, {"flight": 3, "origin": "BER"}]
    guide.topic("flights", flights)
    guide.reader.transform("departures").write_text(DEPARTURES)
    guide.consumer("departures", "flights", transform="departures:transform", retry={"delays": ["1s"]})
    guide.reader.run("tidemark consume departures")
    guide.topics.adopt(["departures.retry.1s"])
    until(lambda: guide.sql("SELECT 1 FROM tidemark.failed_record HAVING bool_and(due_at <= clock_timestamp())"))
    printed = yield "tidemark retries relay departures", AS_IT_STANDS
    guide.topics.adopt(["departures.retry.now", "departures.failed"])
    assert "every record read is accounted for exactly once" in printed
    assert guide.sql("SELECT error_type, count(*) FROM tidemark.failed_record WHERE state = 'FAILED' GROUP BY 1 ORDER BY 1") == [
        ("KeyError", 1),
        ("TimeoutError", 2),
    ]

    printed = yield "tidemark retries show departures 4711", {"4711": "1"}
    failed = (guide.reader.project / "failed.jsonl").read_text().splitlines()
    assert len(failed) == 3
    (guide.reader.project / "fixed.json").write_text('{"flight": 1, "airport": "BER"}')
    (guide.reader.project / "fixed.jsonl").write_text(failed[1].replace("XXX", "BER") + "\n")
    yield "tidemark retries discard departures", {"4711": "1"}
    yield "tidemark redrive plan departures", AS_IT_STANDS


ORDERS = """
from typing import TypedDict

from tidemark.transform import Record


class Order(TypedDict):
    id: int
    total: int


def transform(record: Record) -> Order:
    return {{"id": record.json()["id"], "total": {total}}}
"""


def rewind(guide: Guide) -> Script:
    guide.topic("flights", [{"flight": number} for number in range(3)])
    guide.consumer("departures", "flights")
    guide.reader.run("tidemark consume departures")
    printed = yield "tidemark rewind verify 1", AS_IT_STANDS
    assert "Rewind 2 (PLANNED)" in printed

    printed = yield "tidemark rewind swap 2", {" 2 ": " 3 "}
    assert "swapped rewind 3" in printed

    guide.topic("orders", [{"id": number, "total": 10} for number in range(3)])
    for name, total in (("orders", 10), ("new_orders", 9)):
        guide.reader.transform(name).write_text(ORDERS.format(total=total))
    guide.consumer("orders", "orders", transform="orders:transform")
    guide.reader.run("tidemark consume orders")
    printed = yield "--transform new_orders:transform", {f"{verb} 3": f"{verb} 4" for verb in ("apply", "replay", "verify", "discard")}
    assert "discarded the replay of rewind 4" in printed
    assert guide.sql("SELECT id, total FROM public.orders ORDER BY 1") == [(number, 10) for number in range(3)]

    guide.topics.produce("flights", ['{"flight": 3}', '{"flight": 4}'])
    yield "tidemark backfill departures", {"apply 18": "apply 5", "departures 18": "departures 5"}
    assert guide.sql("SELECT flight FROM public.departures ORDER BY 1") == [(number,) for number in range(5)]


def inputs(guide: Guide) -> Script:
    guide.topic("cities", [{"name": "Ulm", "population": number} for number in range(600)])
    guide.reader.run("tidemark sink ddl cities | tidemark local psql && tidemark consume cities")
    printed = yield "--to-offset 500", AS_IT_STANDS
    assert "-100" in printed


def personal_data(guide: Guide) -> Script:
    guide.topic("orders", [{"customer_id": 42, "item": "tea"}], key="customer-42")
    guide.topics.produce("orders", ['{"customer_id": 43, "item": "tea"}'], key="customer-43")
    guide.consumer("orders", "orders")
    guide.reader.run("tidemark consume orders")
    yield "tidemark erase plan orders", AS_IT_STANDS
    assert guide.sql("SELECT customer_id FROM public.orders") == [(43,)]


def security(guide: Guide) -> Script:
    guide.topic("flights", [{"flight": 1}])
    guide.consumer("departures", "flights")
    guide.reader.run("tidemark pause departures")
    printed = yield "tidemark audit-log --group departures", AS_IT_STANDS
    assert printed.count("FLOW PAUSED") == 2


def deployment(guide: Guide) -> Script:
    printed = yield "project.consume_job()", AS_IT_STANDS
    assert Path(printed.strip()).is_file()


GUIDES: dict[str, Callable[[Guide], Script]] = {
    "docs/coming-from/foreach-batch.md": from_foreach_batch,
    "docs/coming-from/hand-written-loop.md": from_a_hand_written_loop,
    "docs/coming-from/kafka-connect.md": from_kafka_connect,
    "docs/consumers.md": consumers,
    "docs/deployment/index.md": deployment,
    "docs/inputs.md": inputs,
    "docs/personal-data.md": personal_data,
    "docs/retries.md": retries,
    "docs/rewind.md": rewind,
    "docs/security.md": security,
}
NEWCOMERS = {"README.md", *(f"docs/tutorials/{name}.md" for name in ("group", "retries", "rewind"))}


@pytest.mark.thorough
@pytest.mark.parametrize("page", [pytest.param(page, marks=pytest.mark.needs("jq")) if "foreach" in page else page for page in GUIDES])
def test_commands_of_a_guide_run_in_order(page: str, beside_the_tests_servers: PageReader, scenario: Scenario) -> None:
    beside_the_tests_servers.read(page, GUIDES[page](Guide(beside_the_tests_servers, scenario)))


def test_each_page_with_commands_is_read_or_says_why_not() -> None:
    unread = [block for block in blocks("sh") if block.page not in GUIDES and block.page not in NEWCOMERS]
    assert [str(block) for block in unread if not reason(block)] == [], "write a script for the page, or add the block to NOT_RUN"
    listed = {(page, start) for page, starts in NOT_RUN.items() for start in starts}
    used = {(block.page, start) for block in blocks("sh") for start in NOT_RUN.get(block.page, ()) if block.code.startswith(start)}
    assert listed - used == set(), "no block begins like this"


def test_each_script_has_a_step_for_each_block_of_its_page() -> None:
    """Without running them: most guides are read at night only."""
    run = {page: sum(not reason(block) for block in blocks("sh", page=page)) for page in GUIDES}
    steps = {page: sum(isinstance(node, ast.Yield) for node in ast.walk(ast.parse(inspect.getsource(GUIDES[page])))) for page in GUIDES}
    assert steps == run
