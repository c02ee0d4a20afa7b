"""Rows that Postgres, or the encoder before it, refuses: good rows are loaded, and bad ones become failed records with Postgres'
message."""

from __future__ import annotations

import itertools
import re
import traceback
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.sampling import examples
from tests.support.scenario import Scenario

from tidemark.errors import DatabaseUnavailable, TidemarkError
from tidemark.records.outcome import DETAIL, Disposition, TransformOutput, only
from tidemark.records.ranges import Epoch, Slice, TopicPartition
from tidemark.sink import commit as commit_module
from tidemark.sink.load import Refusals, SinkRejected, TooManyRejected, load_carefully
from tidemark.sink.table import Column, Layout
from tidemark.sink.tally import Tally

ARROW = """
    import pyarrow as pa
    import pyarrow.compute as pc


    def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
        lineage = {name: batch[name] for name in ("kafka_topic", "kafka_partition", "kafka_offset")}
        return pa.RecordBatch.from_pydict({"payload": %s, **lineage})
"""
TEXT = "batch['value'].view(pa.string())"
PIECES = """
    from collections.abc import Iterator
    from typing import TypedDict

    from tidemark.transform import Record


    class Row(TypedDict):
        payload: str


    def transform(record: Record) -> Iterator[Row]:
        for piece in record.value.decode().split():
            yield {"payload": piece}
"""


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


UUIDS = "pa.array(['%032x' % int(v) if v.isdigit() else v.decode() for v in batch['value'].to_pylist()])"
NULLED = f"pc.if_else(pc.equal(batch['value'], b'none'), None, {TEXT})"
DATED = "pc.if_else(pc.equal(batch['value'], b'early'), -(2**63), 0).cast(pa.timestamp('us', 'UTC'))"
LONG = b"x" * 3000 + bytes(f"{list(range(2000))}", "ascii")
NO_UTF8 = ("CharacterNotInRepertoire", "invalid byte sequence for encoding")
FOREIGN = ("ForeignKeyViolation", "violates foreign key constraint")
DOUBLE = ("UniqueViolation", "violates unique constraint")
REFUSALS: list[tuple[str, str, bytes, tuple[str, str]]] = [
    ("text", TEXT, b"a\0b", NO_UTF8),
    ("text", TEXT, b"\xff\xfe", NO_UTF8),
    ("varchar(3)", TEXT, b"four", ("StringDataRightTruncation", "value too long for type character varying(3)")),
    ("jsonb", TEXT, b"{", ("InvalidTextRepresentation", "invalid input syntax for type json")),
    ("uuid", UUIDS, b"no uuid", ("NotEncodable", "uuid")),
    ("text NOT NULL", NULLED, b"none", ("NotNullViolation", "null value in column")),
    ("text CONSTRAINT never CHECK (payload <> 'x')", TEXT, b"x", ("CheckViolation", '"never"')),
    ("text REFERENCES lake.known", TEXT, b"unknown", FOREIGN),
    ("text REFERENCES lake.known DEFERRABLE INITIALLY DEFERRED", TEXT, b"unknown", FOREIGN),
    ("text UNIQUE", TEXT, b"3", DOUBLE),
    ("text UNIQUE DEFERRABLE INITIALLY DEFERRED", TEXT, b"3", DOUBLE),
    ("text UNIQUE", TEXT, LONG, ("ProgramLimitExceeded", "exceeds btree")),
    ("timestamp with time zone", DATED, b"early", ("NotEncodable", "it is out of range")),
]


@pytest.mark.sampled("error")
@pytest.mark.parametrize(("column", "payload", "bad", "error"), REFUSALS)
def test_one_bad_row_among_many_is_left_out(scenario: Scenario, column: str, payload: str, bad: bytes, error: tuple[str, str]) -> None:
    """Covers every kind of refusal, in the middle of a slice of several batches."""
    topic = scenario.topics.create()
    scenario.topics.produce(topic, [*numbers(0, 5), bad, *numbers(5, 12)])
    scenario.write(ARROW % payload, topics=topic)
    scenario.sql("CREATE SCHEMA lake; CREATE TABLE lake.known (payload text PRIMARY KEY)")
    scenario.sql("INSERT INTO lake.known SELECT generate_series(0, 20)::text")
    scenario.make_sink(f"payload {column}")
    scenario.run()
    assert scenario.rows("kafka_offset") == [offset for offset in range(13) if offset != 5]
    ((offset, disposition, error_type, text, value),) = scenario.failed("record_offset, disposition, error_type, error_text, value")
    assert (offset, disposition, error_type, value) == (5, "fail", error[0], bad)
    assert error[1] in text
    assert scenario.counts() == {"loaded": 12, "failed": 1, "sink_rows": 12}
    scenario.sql(f"ALTER TABLE {scenario.table} DROP payload")  # `check` compares the column with bytes
    scenario.check()


DUPLICATE = 'duplicate key value violates unique constraint "{table}_payload_key".'
CAST = "invalid input syntax for type integer: …."


@pytest.mark.sampled("allowed", "column")
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize(
    ("column", "bad", "message", "detail"),
    [
        ("text UNIQUE", b"3", DUPLICATE, "Key (payload)=(3) already exists."),
        ("jsonb", b'{"iban": x', "invalid input syntax for type json.", 'Token "x" is invalid.'),
        ("text CHECK (payload::integer < 100)", b'4"2 secret', CAST, 'invalid input syntax for type integer: "4"2 secret".'),
    ],
)
def test_text_of_a_refused_row_quotes_its_values_only_where_the_file_allows_it(
    scenario: Scenario, caplog: pytest.LogCaptureFixture, column: str, bad: bytes, message: str, detail: str, *, allowed: bool
) -> None:
    """Names of tables, columns and constraints are kept. Text that quotes a value is on a separate line, and only in the failed record."""
    sink = {"table": scenario.table, "error_detail": allowed}
    scenario.feed([*numbers(0, 5), bad], ARROW % TEXT, f"payload {column}", sink=sink)
    scenario.run()
    ((_, _, _, text),) = scenario.failed()
    name = scenario.table.split(".")[1]
    assert text == message.format(table=name) + (f"\nDETAIL: {detail}" if allowed else "")
    assert "isolating their records" in caplog.text
    assert detail not in caplog.text
    assert "secret" not in caplog.text


def test_bad_rows_of_several_partitions_and_kinds(scenario: Scenario) -> None:
    """Slices without a bad row are committed at once. The others are retried, each separately."""
    topic = scenario.topics.create(3)
    scenario.topics.produce(topic, numbers(0, 20), partition=0)
    scenario.topics.produce(topic, [*numbers(0, 3), b"a\0", *numbers(3, 9), b"\xff", b"long"], partition=1)
    scenario.topics.produce(topic, [b"\0"], partition=2)
    scenario.write(ARROW % TEXT, topics=topic).make_sink("payload varchar(3)")
    scenario.run()
    assert scenario.engine is not None
    assert [len(batch) for batch in scenario.engine.batches] == [3, 2]
    found = "partition, record_offset, error_type"
    assert scenario.failed(found) == [
        (1, 3, "CharacterNotInRepertoire"),
        (1, 10, "CharacterNotInRepertoire"),
        (1, 11, "StringDataRightTruncation"),
        (2, 0, "CharacterNotInRepertoire"),
    ]
    assert scenario.counts() == {"loaded": 29, "failed": 4, "sink_rows": 29}
    assert scenario.positions() == {(topic, 0): 20, (topic, 1): 12, (topic, 2): 1}


def test_record_of_which_one_row_is_refused_has_none(scenario: Scenario) -> None:
    """A record is either loaded with all of its rows, or it fails. What the transform fails is stored beside what Postgres refuses."""
    scenario.feed([b"a b c", b"d x e", b"f", b"x", b"g h", b"\xff"], PIECES, "payload text CHECK (payload <> 'x')")
    scenario.run()
    assert scenario.rows("kafka_offset, kafka_seq, payload") == [
        (0, 0, "a"), (0, 1, "b"), (0, 2, "c"), (2, 0, "f"), (4, 0, "g"), (4, 1, "h"),
    ]  # fmt: skip
    assert [row[:3] for row in scenario.failed()] == [
        (1, "fail", "CheckViolation"), (3, "fail", "CheckViolation"), (5, "retry", "UnicodeDecodeError"),
    ]  # fmt: skip
    assert scenario.counts() == {"loaded": 3, "failed": 2, "retried": 1, "sink_rows": 6}


def test_slice_that_is_bad_throughout_stops_without_a_storm(scenario: Scenario) -> None:
    """A thousand refusals are not an accident. One transaction is tried and rolled back, and the error says what to do."""
    topic = scenario.feed(numbers(0, 5000), ARROW % TEXT, "payload text CHECK (payload = '')")
    before = scenario.sql("SELECT pg_current_xact_id()::text::bigint")[0][0]
    with pytest.raises(TooManyRejected, match=r"rows of more than 1,000 records.*CheckViolation(.|\n)*batch\.max_failed_records"):
        scenario.run()
    used = scenario.sql("SELECT pg_current_xact_id()::text::bigint")[0][0] - before
    assert used < 3000  # subtransactions count too: two per bad record, not one per row of the topic
    assert scenario.positions() == {(topic, 0): 0}
    assert scenario.rows() == scenario.failed() == []
    assert scenario.attempt()["error"]["kind"] == "refused"


@pytest.mark.parametrize(("limit", "stops"), [(0, True), (2, True), (3, False)])
def test_the_spec_says_how_many_may_be_refused(scenario: Scenario, limit: int, stops: bool) -> None:
    """The limit is the same as for records that the transform fails."""
    values = (b"1", b"\0", b"2", b"\0", b"\0", b"3")
    topic = scenario.feed(values, ARROW % TEXT, "payload text", batch={"max_failed_records": limit})
    if stops:
        with pytest.raises(TooManyRejected, match=f"more than {limit} records"):
            scenario.run()
    else:
        scenario.run()
    assert scenario.positions() == {(topic, 0): 0 if stops else 6}
    assert len(scenario.failed()) == (0 if stops else 3)


def test_an_error_of_the_table_is_nobodys_row(scenario: Scenario) -> None:
    """What a trigger of the table misses is missing for every row. The run is refused, and no record fails."""
    scenario.feed(numbers(0, 3), ARROW % TEXT, "payload text")
    scenario.sql("CREATE FUNCTION lake.oops() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM nothing_there(); RETURN NEW; END'")
    scenario.sql(f"CREATE TRIGGER oops BEFORE INSERT ON {scenario.table} FOR EACH ROW EXECUTE FUNCTION lake.oops()")
    with pytest.raises(SinkRejected, match="UndefinedFunction"):
        scenario.run()
    assert scenario.failed() == []
    scenario.sql(f"DROP TRIGGER oops ON {scenario.table}")
    scenario.sql(
        f"""CREATE FUNCTION lake.closed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'closed' USING ERRCODE = 'XX000'; END $$;
        CREATE TRIGGER closed BEFORE INSERT ON {scenario.table} FOR EACH STATEMENT EXECUTE FUNCTION lake.closed()"""
    )
    with pytest.raises(SinkRejected, match=r"the function lake\.closed\(\)"):
        scenario.run()
    act = "CREATE SEQUENCE lake.unused; CREATE OR REPLACE FUNCTION lake.closed() RETURNS trigger LANGUAGE plpgsql"
    scenario.sql(f"{act} AS 'BEGIN PERFORM currval(''lake.unused''); RETURN NULL; END'")
    with pytest.raises(DatabaseUnavailable, match="ObjectNotInPrerequisiteState"):  # the code of an outage
        scenario.run()
    assert scenario.failed() == []


OF_TRIGGERS = {
    "InvalidTextRepresentation": "PERFORM NEW.payload::integer",
    "NoDataFound": "SELECT oid INTO STRICT one FROM pg_class WHERE relname = NEW.payload",
    "TooManyRows": "SELECT oid INTO STRICT one FROM pg_class",
    "CardinalityViolation": "one := (SELECT generate_series(1, 2))",
    "AssertFailure": "ASSERT false",
    "SyntaxError": "PERFORM to_tsquery('simple', NEW.payload || ' red')",
    "UndefinedTable": "EXECUTE format('SELECT FROM lake.%I', NEW.payload)",
    "UndefinedFunction": "EXECUTE format('SELECT lake.%I()', NEW.payload)",
    "ObjectNotInPrerequisiteState": "PERFORM currval('lake.unused')",
    "ConfigurationLimitExceeded": "PERFORM count(*) FROM (SELECT g FROM generate_series(1, 200000) g ORDER BY md5(g::text)) sorted",
    **{
        name: f"RAISE EXCEPTION 'no' USING ERRCODE = '{code}'"
        for name, code in {
            "RaiseException": "P0001", "FeatureNotSupported": "0A000",
            "InsufficientPrivilege": "42501", "InternalError_": "XX000", "DataCorrupted": "XX001", "DiskFull": "53100",
            "SerializationFailure": "40001", "QueryCanceled": "57014", "ConnectionFailure": "08006", "LockNotAvailable": "55P03",
            "SH001": "SH001",
        }.items()
    },
}  # fmt: skip
"""What a trigger does with a row, by psycopg2's name of the error."""


def make_trigger(scenario: Scenario) -> None:
    cases = "\n".join(f"WHEN '{name}' THEN {act};" for name, act in OF_TRIGGERS.items())
    scenario.sql(
        f"""CREATE SEQUENCE lake.unused;
        CREATE FUNCTION lake.act() RETURNS trigger LANGUAGE plpgsql SET temp_file_limit = '100kB' SET work_mem = '64kB' AS $$
        DECLARE one bigint;
        BEGIN CASE NEW.payload {cases} ELSE NULL; END CASE; RETURN NEW; END $$;
        CREATE TRIGGER acts BEFORE INSERT ON {scenario.table} FOR EACH ROW EXECUTE FUNCTION lake.act()"""
    )


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_whatever_a_trigger_raises_for_a_row_its_record_fails_and_the_others_load(scenario: Scenario, mode: str) -> None:
    """Also what would be an outage if the session had raised it."""
    names = list(OF_TRIGGERS)
    values = (*numbers(0, 5), *map(str.encode, names), *numbers(5, 9))
    key = {"mode": "upsert", "key": ["payload"]} if mode == "upsert" else {}
    scenario.feed(values, ARROW % TEXT, "payload text UNIQUE NOT NULL", sink={"table": scenario.table, **key})
    make_trigger(scenario)
    scenario.run()
    assert scenario.rows() == [f"{number}" for number in range(9)]
    assert scenario.failed("record_offset, error_type") == [(5 + at, name) for at, name in enumerate(names)]


@pytest.mark.parametrize("name", ["ObjectNotInPrerequisiteState", "SyntaxError", "InternalError_"])
def test_record_whose_row_a_trigger_refuses_fails_also_if_it_is_alone_in_its_slice(scenario: Scenario, name: str) -> None:
    scenario.feed([name], ARROW % TEXT, "payload text")
    make_trigger(scenario)
    scenario.run()
    assert scenario.failed("error_type") == [(name,)]


def test_slow_transform_is_not_waited_for_in_a_transaction(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for bad rows takes several COPYs. The transform ends before the transaction begins, so it may take longer than a session
    may be idle in a transaction."""
    monkeypatch.setattr(commit_module, "IDLE_TIMEOUT_MS", 5000)
    slow = PIECES.replace("for piece", "__import__('time').sleep(0.2)\n        for piece")
    scenario.feed([*numbers(0, 12), b"a\0b", *numbers(12, 30)], slow, "payload text")
    scenario.run()
    assert scenario.counts() == {"loaded": 30, "failed": 1, "sink_rows": 30}
    assert scenario.failed("record_offset, error_type") == [(12, "CharacterNotInRepertoire")]


# ---- bisection, in isolation


PART = Slice(TopicPartition("t", 0), 1, 0, 60, Epoch(1))
LAYOUT = Layout("pg_temp.poison", (Column("payload", "integer"),))


@pytest.fixture(scope="module")
def poison(stack: Any) -> Iterator[Any]:
    import psycopg2

    connection = psycopg2.connect(stack.env()["TIDEMARK_DATABASE_URL"])
    with connection.cursor() as cur:
        cur.execute(
            "CREATE TEMP TABLE poison (payload integer CHECK (payload >= 0),"
            " kafka_topic_id smallint, kafka_partition integer, kafka_offset bigint, kafka_seq integer)"
        )
        connection.commit()
        yield cur
    connection.close()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    records=st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 240), max_size=6),
    care=st.integers(1, 40),
    care_bytes=st.integers(1, 4000),
)
def test_exactly_the_records_with_a_bad_row_are_left_out(
    poison: Any, records: list[list[bool]], cuts: list[int], care: int, care_bytes: int
) -> None:
    """Whichever rows are bad and wherever the batches are split, good records have all of their rows and bad ones none. Each bad record is
    reported once."""
    poison.connection.rollback()
    rows = [(offset, 1 if good else -1) for offset, record in enumerate(records) for good in record]
    edges = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    tally = Tally(PART)

    def batches() -> Iterator[pa.RecordBatch]:
        for start, end in itertools.pairwise(edges):
            offsets, payloads = zip(*rows[start:end], strict=True)
            columns = {
                "payload": pa.array(payloads, pa.int32()),
                "kafka_topic": pa.array(["t"] * len(offsets)),
                "kafka_partition": pa.array([0] * len(offsets), pa.int32()),
                "kafka_offset": pa.array(offsets, pa.int64()),
            }
            taken = tally.take(TransformOutput(only(pa.RecordBatch.from_pydict(columns))), LAYOUT)
            assert taken is not None
            yield taken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidemark.sink.load.CARE_ROWS", care)
        patch.setattr("tidemark.sink.load.CARE_BYTES", care_bytes)
        load_carefully(poison, PART, LAYOUT, batches(), tally, Refusals(limit=1000))
    poison.execute("SELECT kafka_offset, kafka_seq FROM poison ORDER BY 1, 2")
    good = {offset for offset, record in enumerate(records) if all(record)}
    assert poison.fetchall() == [(offset, seq) for offset in sorted(good) for seq in range(len(records[offset]))]
    assert {offset: one.disposition for offset, one in tally.rejects.items()} == {
        offset: Disposition.FAIL for offset in range(len(records)) if offset not in good
    }
    counts = tally.counts()
    assert (counts.loaded, counts.failed, counts.unaccounted) == (len(good), len(records) - len(good), PART.span - len(records))


# ---- values in errors

SECRET = "4929-s3cr3t-0000"
RAISES = """
    CREATE FUNCTION lake.raises() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'not %', NEW.payload USING ERRCODE = '{state}', DETAIL = NEW.payload, HINT = NEW.payload; END $$;
    CREATE TRIGGER raises BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION lake.raises()
"""
QUOTING = {
    "a cast (22P02)": ("payload text, number integer GENERATED ALWAYS AS (payload::integer) STORED", SECRET),
    "bytes (22021)": ("payload text", b"\xff\xfe" + SECRET.encode()),
    "an error of its own (ABC12)": (None, SECRET),
}


@pytest.mark.parametrize("kind", QUOTING)
def test_no_log_or_error_quotes_a_value(scenario: Scenario, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Whatever Postgres, a constraint or a trigger says of it: ``tests/integration/project/test_values_in_errors.py`` tries more. A failed
    record keeps the words that quote it apart from the rest."""
    ddl, value = QUOTING[kind]
    scenario.feed([value], ARROW % TEXT, ddl or "payload text")
    if ddl is None:
        scenario.sql(RAISES.format(table=scenario.table, state=kind[-6:-1]))
    said = ""
    with caplog.at_level("DEBUG"):
        try:
            scenario.run()
        except TidemarkError as error:
            said = f"{error} {error!r} {''.join(traceback.format_exception(error))}"
    said += caplog.text + str(scenario.sql("SELECT error FROM tidemark.attempt"))
    failed = scenario.failed("error_type, error_text")
    for _, text in failed:
        said += text.partition(DETAIL)[0]
    assert failed or "Nothing" in said
    assert not re.search("s3cr3t|4929|0xff", said), said
