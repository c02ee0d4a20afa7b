"""A consumer that loads orders and their lines into two tables, in each form of a transform."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg2

from tests.support.scenario import Scenario
from tests.support.spark_here import run_here
from tidemark.quality import check_conservation

Order = Mapping[str, Any]

FORMS = {
    "function": """
        from tidemark.transform import Delete, Fail, Record, Retry, to

        def transform(record: Record):
            order = record.json()
            if order.get("word") == "retry":
                raise Retry("not yet")
            if order.get("word") == "skip":
                return
            if order.get("word") == "delete":
                yield to("lines", Delete(order_id=order["id"], line=order["line"]))
                return
            if not order.get("orphan"):
                yield to("orders", {"id": order["id"], "customer": order["customer"]})
            for number, quantity in enumerate(order["lines"]):
                yield to("lines", {"order_id": order["id"], "line": number, "quantity": quantity})
    """,
    "arrow": """
        import json
        import pyarrow as pa

        GIVEN = ["kafka_topic", "kafka_partition", "kafka_offset"]
        SCHEMA = pa.schema([(GIVEN[0], pa.string()), (GIVEN[1], pa.int32()), (GIVEN[2], pa.int64())])
        ORDERS = pa.schema([*SCHEMA, ("id", pa.int64()), ("customer", pa.string()), ("disposition", pa.string())])
        LINES = pa.schema([*SCHEMA, ("order_id", pa.int64()), ("line", pa.int32()), ("quantity", pa.int32()), ("disposition", pa.string())])

        def transform(batch: pa.RecordBatch) -> dict[str, pa.RecordBatch]:
            orders, lines = [], []
            for record in batch.select([*GIVEN, "value"]).to_pylist():
                order, lineage = json.loads(record.pop("value")), record
                word = order.get("word")
                if word in ("retry", "skip"):
                    orders.append({**lineage, "disposition": word})
                elif word == "delete":
                    lines.append({**lineage, "order_id": order["id"], "line": order["line"], "disposition": "delete"})
                else:
                    if not order.get("orphan"):
                        orders.append({**lineage, "id": order["id"], "customer": order["customer"]})
                    lines += [{**lineage, "order_id": order["id"], "line": at, "quantity": many} for at, many in enumerate(order["lines"])]
            return {
                "orders": pa.RecordBatch.from_pylist(orders, schema=ORDERS),
                "lines": pa.RecordBatch.from_pylist(lines, schema=LINES),
            }
    """,
    "spark": """
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F

        SHAPE = "id bigint, customer string, lines array<int>, word string, line int, orphan boolean"

        def transform(records: DataFrame) -> dict[str, DataFrame]:
            lineage = ("kafka_topic", "kafka_partition", "kafka_offset")
            order = records.select(*lineage, F.from_json(F.col("value").cast("string"), SHAPE).alias("it")).select(*lineage, "it.*")
            words = F.when(F.col("word").isin("retry", "skip"), F.col("word")).otherwise("load").alias("disposition")
            orders = order.where("coalesce(word, '') <> 'delete' AND NOT coalesce(orphan, false)")
            exploded = F.posexplode("lines").alias("line", "quantity")
            lines = order.where("word IS NULL").select(*lineage, F.col("id").alias("order_id"), exploded)
            gone = order.where("word = 'delete'")
            gone = gone.select(*lineage, F.col("id").alias("order_id"), "line", F.lit(None).cast("int").alias("quantity"))
            return {
                "orders": orders.select(*lineage, "id", "customer", words),
                "lines": lines.withColumn("disposition", F.lit("load")).union(gone.withColumn("disposition", F.lit("delete"))),
            }
    """,
}
LINEAGE = (
    "kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL, "
    "UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq)"
)


class Shop:
    """A consumer of orders with their lines. Each line requires its order."""

    def __init__(self, scenario: Scenario, form: str, topic: str | None = None) -> None:
        self.scenario = scenario
        self.topic = topic or scenario.topics.create()
        self.orders, self.lines = f"{scenario.table}_orders", f"{scenario.table}_lines"
        self.form, self.source = form, FORMS[form]
        sinks = {
            "orders": {"table": self.orders},
            "lines": {"table": self.lines, "mode": "upsert", "key": ["order_id", "line"], "deletes": "hard"},
        }
        scenario.write(FORMS[form], topics=self.topic, sink=None, sinks=sinks)
        scenario.sql(
            "CREATE SCHEMA IF NOT EXISTS lake;"
            f"CREATE TABLE {self.orders} (id bigint NOT NULL UNIQUE, customer text CHECK (customer <> 'nobody'), {LINEAGE});"
            f"CREATE TABLE {self.lines} (order_id bigint NOT NULL REFERENCES {self.orders} (id), line integer NOT NULL, "
            f"quantity integer CHECK (quantity > 0), UNIQUE (order_id, line), {LINEAGE})"
        )

    def produce(self, *orders: Order) -> None:
        self.scenario.topics.produce(self.topic, [json.dumps({"customer": "ann", "lines": [], **order}) for order in orders])

    def run(self, **options: Any) -> None:
        if self.form == "spark":
            run_here(self.scenario, **options)
        else:
            self.scenario.run(**options)

    def loaded(self) -> dict[int, list[int]]:
        """The quantities of each order's lines, by order number."""
        found: dict[int, list[int]] = {number: [] for (number,) in self.scenario.sql(f"SELECT id FROM {self.orders} ORDER BY id")}
        for number, quantity in self.scenario.sql(f"SELECT order_id, quantity FROM {self.lines} ORDER BY order_id, line"):
            found[number].append(quantity)
        return found

    def violations(self) -> Sequence[object]:
        with contextlib.closing(psycopg2.connect(self.scenario.database_url)) as connection, connection.cursor() as cur:
            return check_conservation(cur, self.scenario.spec.group, [self.orders, self.lines], upsert=True)
