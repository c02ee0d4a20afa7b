"""The jars of the other contestants, fetched by the Ivy that pyspark ships. If some are unavailable, their contestants are skipped."""

from __future__ import annotations

from pathlib import Path

from tidemark.jvm.jars import Recipe

_HERE = Path(__file__).parent
RECIPES = {
    "jdbc": Recipe(_HERE / "jdbc.xml", ("jdbc",), "Postgres' JDBC driver", "1 MB"),
    "connect": Recipe(_HERE / "connect.xml", ("connect",), "the jars of Kafka Connect with Debezium's JDBC sink", "66 MB"),
}
