"""Transforms for tests, as users would write them: the same transform in each form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.scenario import ARROW, PLAIN, Scenario

FORMS = pytest.mark.parametrize("transform", [PLAIN, ARROW], ids=["function", "arrow"])
"""The forms that need no JVM. Each record becomes one row."""

PICKY = """
    from typing import TypedDict

    from tidemark.transform import Fail, Record


    class Row(TypedDict):
        payload: bytes | None


    def transform(record: Record) -> Row:
        if (record.value or b"").startswith(b"bad"):
            raise Fail("it is bad")
        return {"payload": record.value}
"""
"""Fails the records whose value begins with ``bad``."""

JUDGES = {
    "function": """
        from tidemark.transform import Fail, Record, Retry, Skip

        def transform(record: Record) -> dict:
            word = (record.value or b"fail").decode()
            if word == "skip":
                raise Skip("not wanted")
            if word == "fail":
                raise Fail("no carrier")
            if word == "retry":
                raise Retry("try later")
            return {"payload": record.value}
    """,
    "arrow": """
        import pyarrow as pa
        import pyarrow.compute as pc

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            word = pc.fill_null(batch["value"], b"fail").cast(pa.string())
            said = pc.if_else(pc.is_in(word, pa.array(["skip", "fail", "retry"])), word, None)
            names = {"fail": "Fail: no carrier", "retry": "Retry: try later"}
            error = pa.array([names.get(each) for each in word.to_pylist()], pa.string())
            lineage = [batch[name] for name in ("kafka_topic", "kafka_partition", "kafka_offset")]
            columns = ["kafka_topic", "kafka_partition", "kafka_offset", "payload", "disposition", "error"]
            return pa.RecordBatch.from_arrays([*lineage, batch["value"], said, error], names=columns)
    """,
    "spark": """
        from pyspark.sql import DataFrame

        def transform(records: DataFrame) -> DataFrame:
            word = "coalesce(CAST(value AS string), 'fail')"
            errors = "CASE word WHEN 'fail' THEN 'Fail: no carrier' WHEN 'retry' THEN 'Retry: try later' END AS error"
            said = "CASE WHEN word IN ('skip', 'fail', 'retry') THEN word END AS disposition"
            lineage = ["kafka_topic", "kafka_partition", "kafka_offset"]
            return records.selectExpr("*", f"{word} AS word").selectExpr(*lineage, "value AS payload", said, errors)
    """,
}
"""A record's value says what happens to it; null means ``fail``. The sink's column is ``payload bytea``."""

ECHOES = {
    "function": """
        from tidemark.transform import Record

        def transform(record: Record) -> dict:
            names, contents = [name for name, _ in record.headers], [content for _, content in record.headers]
            return {"at": record.timestamp, "key": record.key, "payload": record.value, "names": names, "contents": contents}
    """,
    "arrow": """
        import pyarrow as pa

        def transform(batch: pa.RecordBatch) -> pa.RecordBatch:
            headers, each = batch["headers"], batch["headers"].values
            lists = [pa.ListArray.from_arrays(headers.offsets, each.field(name), mask=headers.is_null()) for name in ("key", "value")]
            columns = ["kafka_topic", "kafka_partition", "kafka_offset", "timestamp", "key", "value"]
            names = ["kafka_topic", "kafka_partition", "kafka_offset", "at", "key", "payload", "names", "contents"]
            return pa.RecordBatch.from_arrays([*(batch[name] for name in columns), *lists], names=names)
    """,
    "spark": """
        from pyspark.sql import DataFrame

        def transform(records: DataFrame) -> DataFrame:
            lists = ["transform(headers, each -> each.key) AS names", "transform(headers, each -> each.value) AS contents"]
            return records.selectExpr(
                "kafka_topic", "kafka_partition", "kafka_offset", "timestamp AS at", "key", "value AS payload", *lists
            )
    """,
}
"""Transforms that store everything they get of a record."""
ECHO_COLUMNS = "at timestamptz, key bytea, payload bytea, names text[], contents bytea[]"


def echoed(scenario: Scenario) -> list[tuple[Any, ...]]:
    """The rows that `ECHOES` stored."""
    return scenario.rows("kafka_offset, at, key, payload, coalesce(names, '{}'), coalesce(contents::text[], '{}')")


def told(scenario: Scenario, topic: str) -> list[tuple[Any, ...]]:
    """The rows that `ECHOES` should store for the records of the topic's first partition."""
    rows = []
    for offset, record in sorted(scenario.records(topic).items()):
        contents = [None if content is None else f"\\x{content.hex()}" for _, content in record.headers]
        rows.append((offset, record.timestamp, record.key, record.value, [name for name, _ in record.headers], contents))
    return rows


def arrow(body: str) -> str:
    """A transform of the Arrow form with this body. ``batch`` is its argument, and ``given`` holds the lineage columns of ``batch``."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = "import pyarrow as pa\nimport pyarrow.compute as pc\n\nLINEAGE = ['kafka_topic', 'kafka_partition', 'kafka_offset']\n\n"
    return f"{head}\ndef transform(batch: pa.RecordBatch) -> pa.RecordBatch:\n    given = batch.select(LINEAGE)\n{lines}"


def with_column(name: str, values: str) -> str:
    """A statement that adds a column to ``given``."""
    return f"given = given.append_column('{name}', {values})"


def set_column(name: str, values: str) -> str:
    """A statement that replaces a lineage column of ``given``."""
    return f"given = given.set_column(LINEAGE.index('{name}'), '{name}', {values})"


def spark(expression: str) -> str:
    """A transform of the Spark form that returns this expression of ``records``. ``L`` are the lineage columns, ``calls`` counts calls."""
    return f"""
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F

        L = ["kafka_topic", "kafka_partition", "kafka_offset"]
        calls = 0

        def transform(records: DataFrame) -> DataFrame:
            global calls
            calls += 1
            return {expression}
    """
