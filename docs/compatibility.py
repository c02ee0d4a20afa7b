"""Writes the tables of ``docs/compatibility.md`` from the results of ``make matrix``: ``python docs/compatibility.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tidemark.doctor.tried import COMPONENTS, Result, releases, results, span

PAGE = Path(__file__).with_name("compatibility.md")
NAMES = {
    "python": "Python",
    "pyspark": "PySpark",
    "postgres": "Postgres",
    "kafka": "Kafka brokers",
    "sqlalchemy": "SQLAlchemy",
    "protobuf": "Protobuf",
    "great-expectations": "Great Expectations",
}
REMARKS = {
    "pyspark": "3.5: only the Arrow and function forms",
    "postgres": "`migrate` and `doctor` refuse an older one",
    "kafka": "before 2.8, topics have no ids",
}
OF_COLUMN = {"python": "python", "spark": "pyspark", "postgres": "postgres", "kafka": "kafka"}
"""The component whose version a column changes, by the first word of the column's name. Other columns change the packages."""
PACKAGES = tuple(component for component in COMPONENTS if component not in OF_COLUMN.values())


def page() -> str:
    """The page, with new tables between the comments that name them."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in {"ranges": ranges(), "runs": runs()}.items():
        table = "\n".join(["", *lines, ""])
        text = re.sub(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", lambda _, table=table: f"{table}\n", text, count=1, flags=re.DOTALL)
    return text


def ranges() -> Iterator[str]:
    yield "| component | tested versions | note |"
    yield "|---|---|---|"
    for component in COMPONENTS:
        if tried := releases(component):
            between = ", ".join(tried) if component in OF_COLUMN.values() else span(tried)
            yield f"| {NAMES.get(component, component)} | {between} | {REMARKS.get(component, '')} |"


def runs() -> Iterator[str]:
    yield "| column | versions | date | passed | failed | skipped | omitted |"
    yield "|---|---|---|---|---|---|---|"
    for column, result in results().items():
        counts = f"{result.passed} | {result.failed} | {result.skipped} | {', '.join(result.omitted)}"
        yield f"| `{column}` | {versions(column, result)} | {result.date} | {counts} |"


def versions(column: str, result: Result) -> str:
    component = OF_COLUMN.get(column.partition("-")[0])
    shown = [component] if component else [name for name in PACKAGES if name in result.versions]
    return ", ".join(f"{NAMES.get(name, name)} {result.versions[name]}" for name in shown)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
