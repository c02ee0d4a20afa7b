"""Random changes to a table with a column of each type, and a replay of the records that Debezium writes about them."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

from tests.support.change_data import UNAVAILABLE

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WIDE_BYTES = 6_000
"""The size of a random text that Postgres stores outside the row (TOAST)."""


def _moment(rng: Random) -> datetime:
    return EPOCH + timedelta(microseconds=rng.randrange(-(10**15), 4 * 10**15))


def _text(rng: Random) -> str:
    return "".join(rng.choice('aZ é"\\\n\t,{}\U0001f600') for _ in range(rng.randrange(12)))


def _document(rng: Random) -> str:
    return json.dumps({"a": rng.randrange(9), "b": [None, _text(rng)]}, ensure_ascii=False)


def _array(rng: Random, item: Callable[[Random], Any]) -> list[Any]:
    return [rng.choice([None, item(rng)]) for _ in range(rng.randrange(4))]


def _decimal(rng: Random, digits: int, scale: int) -> Decimal:
    return _scaled(rng.randrange(-(10**digits) + 1, 10**digits), scale)


TYPES: dict[str, tuple[str, Callable[[Random], Any]]] = {
    "a_smallint": ("smallint", lambda rng: rng.randrange(-(2**15), 2**15)),
    "an_int": ("int", lambda rng: rng.randrange(-(2**31), 2**31)),
    "a_bigint": ("bigint", lambda rng: rng.randrange(-(2**63), 2**63)),
    "a_price": ("numeric(12,2)", lambda rng: _decimal(rng, 12, 2)),
    "a_numeric": ("numeric", lambda rng: _decimal(rng, 20, rng.randrange(19))),
    "a_real": ("real", lambda rng: rng.randrange(-(2**17), 2**17) / 8),
    "a_double": ("double precision", lambda rng: rng.gauss(0, 1e6)),
    "a_boolean": ("boolean", lambda rng: rng.random() < 0.5),
    "a_text": ("text", _text),
    "a_varchar": ("varchar(20)", _text),
    "a_char": ("char(20)", lambda rng: _text(rng).ljust(20)),
    "a_bytea": ("bytea", lambda rng: rng.randbytes(rng.randrange(20))),
    "a_date": ("date", lambda rng: _moment(rng).date()),
    "a_time": ("time", lambda rng: _moment(rng).time()),
    "a_timestamp": ("timestamp", lambda rng: _moment(rng).replace(tzinfo=None)),
    "a_timestamptz": ("timestamptz", _moment),
    "an_interval": ("interval", lambda rng: timedelta(days=rng.randrange(-99, 99), seconds=rng.randrange(10**6))),
    "a_uuid": ("uuid", lambda rng: str(uuid.UUID(bytes=rng.randbytes(16)))),
    "a_json": ("json", _document),
    "a_jsonb": ("jsonb", _document),
    "texts": ("text[]", lambda rng: _array(rng, _text)),
    "ints": ("int[]", lambda rng: _array(rng, lambda rng: rng.randrange(-(2**31), 2**31))),
    "a_mood": ("mood", lambda rng: rng.choice(["sad", "ok", "happy"])),
    "an_inet": ("inet", lambda rng: f"10.0.{rng.randrange(256)}.{rng.randrange(256)}"),
    "wide": ("text", lambda rng: rng.randbytes(WIDE_BYTES // 2).hex()),
}
"""The type of each column except the primary key ``id``, and a function that makes a value of that type. The functions avoid values that
the connector cannot write exactly: as a number, a month of an interval is 30.4375 days and a fraction of a second may be off by a
microsecond; a numeric NaN becomes null. A numeric has no more digits than a consumer stores in a column without precision: 20 before the
point and 18 after it."""

ENUM = "DO $$ BEGIN CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy'); EXCEPTION WHEN duplicate_object THEN NULL; END $$"
COLUMNS = ", ".join(["id bigint PRIMARY KEY", *(f"{name} {kind}" for name, (kind, _) in TYPES.items())])

Statement = tuple[str, tuple[Any, ...]]
Rows = dict[int, dict[str, Any]]
"""Rows by ``id``."""


@dataclass
class Load:
    """Changes to one table. They are the same for the same ``rng``: a `Random` with a seed, or that of Hypothesis."""

    rng: Random
    table: str
    truncates: bool = False
    _live: list[int] = field(default_factory=list)
    _next: int = 1
    added: list[str] = field(default_factory=list)

    def transactions(self, count: int) -> Iterator[list[Statement]]:
        """The statements of ``count`` transactions. The first ones only insert, so that the later ones find rows."""
        for number in range(count):
            yield [self._statement(first=number < 3) for _ in range(self.rng.randint(1, 4))]

    def _statement(self, *, first: bool) -> Statement:
        if first or not self._live:
            return self._insert()
        kinds = [self._insert, self._update, self._change_key, self._delete, self._add_column, self.truncate]
        (make,) = self.rng.choices(kinds, weights=[30, 40, 12, 12, 3, 3 if self.truncates else 0])
        return make()

    def _insert(self) -> Statement:
        values = {"id": self._new_id(), **self._values(TYPES, nulls=0.2)}
        self._live.append(values["id"])
        marks = ", ".join(_mark(name) for name in values)
        return f"INSERT INTO {self.table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())

    def _update(self) -> Statement:
        """Updates a few columns. A wide value that does not change is not in the WAL."""
        chosen = self.rng.sample([*TYPES, *self.added], self.rng.randint(1, 4))
        values = self._values(chosen, nulls=0.3)
        sets = ", ".join(f"{name} = {_mark(name)}" for name in values)
        return f"UPDATE {self.table} SET {sets} WHERE id = %s", (*values.values(), self.rng.choice(self._live))

    def _change_key(self) -> Statement:
        """Changes a primary key, sometimes to one that another row had before."""
        old = self._live.pop(self.rng.randrange(len(self._live)))
        free = sorted(set(range(1, self._next)) - {*self._live, old})
        new = self.rng.choice(free) if free and self.rng.random() < 0.4 else self._new_id()
        self._live.append(new)
        return f"UPDATE {self.table} SET id = %s WHERE id = %s", (new, old)

    def _delete(self) -> Statement:
        return f"DELETE FROM {self.table} WHERE id = %s", (self._live.pop(self.rng.randrange(len(self._live))),)

    def _add_column(self) -> Statement:
        """Adds a column without a default. With one, the existing rows would get it without any record."""
        self.added.append(f"added_{len(self.added)}")
        return f"ALTER TABLE {self.table} ADD COLUMN {self.added[-1]} text", ()

    def truncate(self) -> Statement:
        self._live.clear()
        return f"TRUNCATE {self.table}", ()

    def _new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def _values(self, columns: Iterable[str], nulls: float) -> dict[str, Any]:
        own = Random(self.rng.randrange(2**32))  # the values need more randomness than Hypothesis provides
        make = {name: TYPES[name][1] if name in TYPES else _text for name in columns}
        return {name: None if own.random() < nulls else make[name](own) for name in make}


def _mark(name: str) -> str:
    return f"(%s)::{TYPES[name][0]}" if name in TYPES else "%s"  # -32768::smallint would be -(32768::smallint)


def differences(found: Rows, expected: Rows) -> list[tuple[Any, ...]]:
    """Returns the ids that only one side has, and then the columns that differ, with both values."""
    both = found.keys() & expected.keys()
    columns = [(number, name) for number in both for name in expected[number] if found[number][name] != expected[number][name]]
    lone = [(number,) for number in found.keys() ^ expected.keys()]
    return [*lone, *((number, name, found[number][name], expected[number][name]) for number, name in columns)]


def completed(replayed: Rows, rows: Rows) -> Rows:
    """Adds null for the columns that were added after a row's last record."""
    names = {name for row in rows.values() for name in row}
    return {number: dict.fromkeys(names) | row for number, row in replayed.items()}


def replayed(records: Iterable[tuple[bytes | None, bytes | None, Mapping[str, bytes]]]) -> Rows:
    """Returns the rows by ``id`` after all records of one partition: key, value and headers, as JSON with schemas.

    If a wide value is unavailable, the row keeps the one that it had. After a change of the key, that is the value of the row with the old
    key: a header of the new row's record names this key, and the record before it has deleted that row.
    """
    rows: Rows = {}
    moved: dict[str, Any] = {}
    for key, value, headers in records:
        if value is None:
            continue
        event = json.loads(value)["payload"]
        if event["op"] == "t":
            rows.clear()
            continue
        number = json.loads(key)["payload"]["id"]
        if event["op"] == "d":
            moved = rows.pop(number, {})
            continue
        schemas = next(part for part in json.loads(value)["schema"]["fields"] if part["field"] == "after")["fields"]
        row = {schema["field"]: _decoded(event["after"][schema["field"]], schema) for schema in schemas}
        before = moved if "__debezium.oldkey" in headers else rows.get(number, {})
        rows[number] = {name: before[name] if found == UNAVAILABLE else found for name, found in row.items()}
    return rows


def _decoded(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value as psycopg2 returns it, with JSON parsed."""
    if value is None:
        return None
    match schema.get("name"):
        case "org.apache.kafka.connect.data.Decimal":
            return _scaled(_unscaled(value), int(schema["parameters"]["scale"]))
        case "io.debezium.data.VariableScaleDecimal":
            return _scaled(_unscaled(value["value"]), value["scale"])
        case "io.debezium.time.Date":
            return EPOCH.date() + timedelta(days=value)
        case "io.debezium.time.MicroTime":
            return (EPOCH + timedelta(microseconds=value)).time()
        case "io.debezium.time.MicroTimestamp":
            return (EPOCH + timedelta(microseconds=value)).replace(tzinfo=None)
        case "io.debezium.time.ZonedTimestamp":
            return datetime.fromisoformat(value)
        case "io.debezium.time.MicroDuration":
            return timedelta(microseconds=value)
        case "io.debezium.data.Json":
            return json.loads(value)
    return base64.b64decode(value) if schema["type"] == "bytes" else value


def _unscaled(text: str) -> int:
    return int.from_bytes(base64.b64decode(text), "big", signed=True)


def _scaled(unscaled: int, scale: int) -> Decimal:
    return Decimal(f"{unscaled}E{-scale}")  # `Decimal.scaleb` rounds to 28 digits
