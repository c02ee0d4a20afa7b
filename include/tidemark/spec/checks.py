"""Checks of single values. Each returns the checked value, or raises `InvalidValue` with the problem and the fix."""

from __future__ import annotations

import builtins
import functools
import keyword
import re
import warnings
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic_core import PydanticCustomError

from tidemark.errors import BadInput
from tidemark.spec.scope import Ranges, ranges
from tidemark.text.duration import FIX as DURATION_FIX
from tidemark.text.duration import parse_duration
from tidemark.text.wording import nearest

CONSUMER_NAME_LIMIT = 241
"""Maximum length of a consumer's name: Airflow allows 250 characters in a dag id, and ``consume__`` takes nine."""
KAFKA_NAME_LIMIT = 249
"""Maximum length of a topic's name (Kafka's ``Topic.MAX_NAME_LENGTH``), and of a group's, which names its retry topics."""
POSTGRES_NAME_LIMIT = 63
"""Maximum bytes of an identifier: Postgres truncates longer ones (``NAMEDATALEN - 1``)."""
SINK_NAME_LIMIT = 40
"""Maximum length of a sink's name, which is part of the name of a temporary table."""
ROLE_NAME_LIMIT = 64
"""Maximum length of a role's name (Flask-AppBuilder's ``Role.name``)."""

PRESETS = ("@hourly", "@daily", "@weekly", "@monthly", "@quarterly", "@yearly", "@once", "@continuous")
"""Airflow's schedule presets."""
ASSIGNORS = ("range", "roundrobin", "sticky", "cooperative-sticky", "random")

_KAFKA_NAME = re.compile(r"[A-Za-z0-9._-]+")
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_$]*")
_CONNECTION_ID = re.compile(r"[\w#!()\-.:/\\]{1,250}")  # as airflow.models.connection
_RANDOM_FIELD = re.compile(r"(?i)[rh](\(|/|$)")  # croniter extensions: a random time, different on every read
_CRON_FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_CRON_LIMIT = 200  # Airflow stores a description of it, at most 1,000 characters
_CRON_FIX = 'write five fields, "*/5 * * * *", a preset, @hourly, or null for no schedule'
_KAFKA_FIX = f'use letters, digits, ".", "_" and "-", at most {KAFKA_NAME_LIMIT} of them'
_TABLE_FIX = "write schema.table in lower case, as Postgres names it without quotes"


class InvalidValue(PydanticCustomError):
    """A value is refused. ``clause`` continues the sentence that the value's path begins ("is not ..."); ``fix`` says what to write."""

    def __new__(cls, clause: str, fix: str) -> InvalidValue:
        return super().__new__(cls, "invalid_value", "refused", {"clause": clause, "fix": fix})

    @property
    def clause(self) -> str:
        return str((self.context or {})["clause"])

    @property
    def fix(self) -> str:
        return str((self.context or {})["fix"])


def consumer_name(name: str) -> str:
    if not _KAFKA_NAME.fullmatch(name):
        raise InvalidValue("is not a consumer's name", 'rename the file: letters, digits, ".", "_" and "-"')
    if len(name) > CONSUMER_NAME_LIMIT:
        raise InvalidValue(f"is too long for a consumer's name: {len(name)} characters", f"rename the file: at most {CONSUMER_NAME_LIMIT}")
    return name


def group_id(text: str) -> str:
    return _kafka_name(text, "a group id")


def topic_name(text: str) -> str:
    if text in (".", ".."):
        raise InvalidValue("is not a topic's name", 'Kafka refuses "." and ".."')
    return _kafka_name(text, "a topic's name")


def topic_pattern(text: str) -> str:
    if not text:
        raise InvalidValue("is empty", "write a regular expression that matches whole topic names: flights-.*")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise InvalidValue(f"is not a regular expression ({error})", "write one that matches whole topic names: flights-.*") from error
    return text


def transform_name(text: str) -> str:
    module, colon, function = text.partition(":")
    fix = "write module:function"
    if not colon and _dotted(text) and "." in text:
        fix = f"write {':'.join(text.rsplit('.', 1))}"
    elif module.endswith(".py"):
        fix = f"write {module.removesuffix('.py').replace('/', '.')}:{function}"
    elif "/" in module:
        fix = f"write {module.replace('/', '.')}:{function}"
    if not colon or module.endswith(".py") or not _dotted(module) or not _dotted(function) or "." in function:
        raise InvalidValue("is not module:function", fix)
    return text


def table_name(text: str) -> str:
    """``schema.table``. The schema defaults to ``public``."""
    parts = text.split(".")
    if len(parts) > 2:
        raise InvalidValue("is not a table's name", "write schema.table; the connection says which database")
    for part in parts:
        _identifier(part, "a table's name", _TABLE_FIX)
    schema, table = parts if len(parts) == 2 else ("public", parts[0])
    if schema == "tidemark":
        raise InvalidValue("is in Tidemark's own schema", "put the table in a schema of your own")
    if schema.startswith("pg_") or schema == "information_schema":
        raise InvalidValue("is in a schema of Postgres itself", "put the table in a schema of your own")
    return f"{schema}.{table}"


def sink_name(text: str) -> str:
    if len(text) > SINK_NAME_LIMIT:
        raise InvalidValue("is too long for a sink's name", f"use at most {SINK_NAME_LIMIT} characters")
    return _identifier(text, "a sink's name", "use lower-case letters, digits and _")


def column_name(text: str) -> str:
    return _identifier(text, "a column's name", "write it in lower case, as Postgres names it without quotes")


def connection_id(text: str) -> str:
    if not _CONNECTION_ID.fullmatch(text):
        raise InvalidValue("is not a connection id", "write the id of an Airflow connection: tidemark_postgres")
    return text


def duration(value: object) -> timedelta:
    if not isinstance(value, str):
        raise InvalidValue("is not a duration", DURATION_FIX)
    try:
        return parse_duration(value)
    except BadInput as error:
        raise InvalidValue("is not a duration", error.fix) from error


def positive_time(length: timedelta) -> timedelta:
    if not length:
        raise InvalidValue("is zero", "write a duration longer than zero: 30s, 5m, 1h")
    return length


def exception_name(text: str) -> str:
    """The name of a built-in exception, or ``module.Class``. Whether the class exists is checked when the transform is loaded."""
    if not _dotted(text):
        raise InvalidValue("is not the name of an exception", "write ValueError, or module.Class for one of your own")
    if "." not in text:
        builtin_names = [name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)]
        if text not in builtin_names:
            near = nearest(text, builtin_names)
            fix = f"write {near}, or module.Class for one of your own" if near else "write module.Class for an exception of your own"
            raise InvalidValue("is not a built-in exception", fix)
    return text


def assignor(text: str) -> str:
    module, colon, name = text.partition(":")
    if text in ASSIGNORS or (colon and _dotted(module) and name.isidentifier()):
        return text
    near = nearest(text, ASSIGNORS)
    raise InvalidValue(
        "is not an assignment strategy", f"write {near}" if near else f"write one of {', '.join(ASSIGNORS)}, or module:Class"
    )


def listener(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and _dotted(module) and name.isidentifier()):
        raise InvalidValue("is not a listener", "write module:Class of your RebalanceListener")
    return text


def schedule(text: str) -> str:
    """Five cron fields that match at least one date, or one of Airflow's presets."""
    if text.startswith("@"):
        if text not in PRESETS:
            near = nearest(text, PRESETS)
            raise InvalidValue("is not an Airflow preset", f"write {near}" if near else f"write one of {', '.join(PRESETS)}")
        return text
    return _cron(text)


def timezone(text: str) -> str:
    try:
        ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        near = nearest(text, available_timezones())
        raise InvalidValue("is not a time zone", f"write {near}" if near else "write a name like Europe/Berlin or UTC") from error
    return text


@functools.cache
def _cron(text: str) -> str:
    """Five cron fields. Cached, because this check takes two thirds of a file's loading time, and consumers share schedules."""
    if len(text) > _CRON_LIMIT:
        raise InvalidValue(f"is a schedule of more than {_CRON_LIMIT} characters", _CRON_FIX)
    fields = text.split()
    if len(fields) != len(_CRON_FIELDS):
        raise InvalidValue(f"is not a cron schedule: it has {len(fields)} of 5 fields", _CRON_FIX)
    from croniter import CroniterBadCronError, CroniterBadDateError, croniter

    for index, name in enumerate(_CRON_FIELDS):
        alone = " ".join(field if place == index else "*" for place, field in enumerate(fields))
        try:
            if any(_RANDOM_FIELD.match(part) for part in fields[index].split(",")):
                raise CroniterBadCronError(fields[index])
            croniter.expand(alone)
        except (CroniterBadCronError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise InvalidValue(f'is not a cron schedule: the {name} is "{fields[index][:40]}"', _CRON_FIX) from error
    try:
        croniter(text, datetime(2026, 1, 1, tzinfo=UTC)).get_next(datetime)
    except (CroniterBadDateError, CroniterBadCronError, OverflowError) as error:
        raise InvalidValue("never comes due", "write a day that exists in its month") from error
    return text


def partition_numbers(value: object) -> Ranges:
    """``0-2`` or ``0,4,7-9``. YAML reads a single partition as a number."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise InvalidValue("is not a list of partitions", 'write 0-2, or "0,4,7-9" in quotes')
    try:
        return ranges(text)
    except BadInput as error:
        raise InvalidValue("is not a list of partitions", f"{error.fix[0].lower()}{error.fix[1:].rstrip('.')}") from error


def suite_name(text: str) -> str:
    if text.endswith((".json", ".yaml", ".yml", ".py")):
        raise InvalidValue("is a file, not a suite", f"write {text.rsplit('.', 1)[0]}")
    if not _KAFKA_NAME.fullmatch(text):
        raise InvalidValue("is not a suite's name", "write the name of a file in include/expectations, without its extension")
    return text


def path(text: str) -> str:
    """The path of a field: ``id``, ``place.country``, ``$key``, ``$key.id``, ``$value``, ``$timestamp`` or ``$change.op``."""
    first, *rest = text.split(".")
    if (
        not all(text.split("."))
        or (first.startswith("$") and first not in ("$key", "$value", "$timestamp", "$change"))
        or (first == "$timestamp" and rest)
    ):
        raise InvalidValue("is not a field", "write the names of fields with dots between them: place.country, $key.id, or $timestamp")
    return text


def alternatives(value: object) -> tuple[object, ...]:
    """One value, or a list of values."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or not all(item is None or isinstance(item, str | int | float) for item in values):
        raise InvalidValue("is not a value or a list of values", "write text, numbers, true, false or null")
    return values


def schema_file(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", text) or ".." in text.split("/"):
        raise InvalidValue("is not a schema's file", "write the name of a file in include/schemas: order.avsc")
    return text


def not_null(value: object) -> object:
    """Refuses null for optional keys: ``offset_reset: null`` is too similar to ``offset_reset: none``."""
    if value is None:
        raise InvalidValue("is empty", "write a value, or remove the key")
    return value


def non_blank(text: str) -> str:
    if not text.strip():
        raise InvalidValue("is empty", "write some text, or remove it")
    return text


def role_name(text: str) -> str:
    """The name of an Airflow role, without commas, which separate roles in ``TIDEMARK_ROLES``."""
    if not text.strip() or text != text.strip() or "," in text or not text.isprintable():
        raise InvalidValue("is not a role's name", "write the name of a role in Airflow, without commas: team-orders")
    if len(text) > ROLE_NAME_LIMIT:
        raise InvalidValue(f"is too long for a role's name: {len(text)} characters", f"write the name of a role, at most {ROLE_NAME_LIMIT}")
    return text


def spark_value(value: object) -> str:
    """A setting in spark-submit's form: numbers and booleans become text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidValue("is not text, a number or true/false", "write one value, in quotes if in doubt")


def _kafka_name(text: str, what: str) -> str:
    if not _KAFKA_NAME.fullmatch(text):
        raise InvalidValue(f"is not {what}", _KAFKA_FIX)
    if len(text) > KAFKA_NAME_LIMIT:
        raise InvalidValue(f"is too long for {what}: {len(text)} characters", _KAFKA_FIX)
    return text


def _identifier(text: str, what: str, fix: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise InvalidValue(f"is not {what}", fix)
    if len(text) > POSTGRES_NAME_LIMIT:
        raise InvalidValue(
            f"is not {what}: it has {len(text)} bytes", f"use at most {POSTGRES_NAME_LIMIT} bytes; Postgres truncates the rest"
        )
    return text


def _dotted(text: str) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))
