"""Rules that span several keys. Pure functions over the file's raw mapping.

They work on unchecked values, so that a file's problems are all reported at once: a wrong ``members`` does not hide a missing ``topics``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tidemark.errors import BadInput
from tidemark.spec import checks
from tidemark.spec.checks import KAFKA_NAME_LIMIT
from tidemark.spec.problem import SECRET, KeyPath, key_text, value_at
from tidemark.spec.retry_topics import failed_topic, is_own, now_topic, retry_topic
from tidemark.text.duration import format_duration, parse_duration
from tidemark.text.wording import nearest, quoted

HANDOVER = timedelta(minutes=2)
"""How much longer than ``run_for`` a continuous run may last until the next one has taken over."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken rule. ``at_key``: the problem is the key, not its value."""

    path: KeyPath
    message: str
    fix: str
    at_key: bool = False


def findings(data: Mapping[str, Any]) -> Iterator[Breach]:
    yield from _record_source(data)
    yield from _fixed_partitions(data)
    yield from _sinks(data)
    yield from _suites(data)
    yield from _run_mode(data)
    yield from _lists(data)
    yield from _retries(data)
    yield from _order(data)
    yield from _spark_conf(data)
    yield from _approval(data)
    yield from _access(data)
    yield from _objectives(data)
    yield from _schema_files(data)
    yield from _without_code(data)
    yield from _change_data(data)


def _record_source(data: Mapping[str, Any]) -> Iterator[Breach]:
    count = ("topics" in data) + ("topic_pattern" in data)
    if count == 2:
        yield Breach(("topic_pattern",), "topics and topic_pattern are both given", "keep one of them", at_key=True)
    if count == 0:
        yield Breach(("topics",), "topics is missing", "name what to read: topics: [flights], or topic_pattern: flights-.*")


def _fixed_partitions(data: Mapping[str, Any]) -> Iterator[Breach]:
    fixed, topics, members = data.get("partitions"), data.get("topics"), data.get("members")
    if not isinstance(fixed, Mapping):
        return
    if "topic_pattern" in data:
        fix = "name the topics, topics: [flights], or remove the key"
        yield Breach(("partitions",), "partitions cannot be combined with topic_pattern", fix, at_key=True)
    if isinstance(members, int) and members > 1:
        message = f"partitions cannot be combined with {members} members"
        yield Breach(("partitions",), message, "remove the key, or write members: 1", at_key=True)
    if not isinstance(topics, tuple):
        return
    names = [topic for topic in topics if isinstance(topic, str)]
    for topic in fixed:
        if topic not in names:
            near = nearest(topic, names)
            fix = f"write {near}" if near else "add the topic to topics, or remove the key"
            yield Breach(("partitions", topic), f"partitions names {quoted(topic)}, which is not in topics", fix, at_key=True)
    for topic in names:
        if topic not in fixed:
            fix = f"add {topic}: 0-2, with the partitions to read, or remove the topic"
            yield Breach(("partitions",), f"partitions has no entry for {quoted(topic)}", fix, at_key=True)


def _sinks(data: Mapping[str, Any]) -> Iterator[Breach]:
    if "sink" in data and "sinks" in data:
        yield Breach(("sinks",), "sink and sinks are both given", "keep one of them", at_key=True)
    if "sink" not in data and "sinks" not in data:
        yield Breach(("sink",), "sink is missing", "name the table for the rows: sink: {table: schema.table}")
    if "sinks" not in data:
        yield from _sink(data, ("sink",))
        return
    sinks = data["sinks"]
    if "transform" not in data:
        fix = "name the function, transform: module:function, or load one table: sink: {table: schema.table}"
        yield Breach(("sinks",), "sinks needs a transform, which says what goes into which table", fix, at_key=True)
    if not isinstance(sinks, Mapping):
        return
    if not sinks:
        yield Breach(("sinks",), "sinks is empty", "write {orders: {table: shop.orders}, lines: {table: shop.order_lines}}")
    tables: dict[str, str] = {}
    for name in sinks:
        try:
            checks.sink_name(str(name))
        except checks.InvalidValue as error:
            yield Breach(("sinks", name), f"{quoted(str(name))} {error.clause}", error.fix, at_key=True)
        yield from _sink(data, ("sinks", name))
        table = value_at(data, ("sinks", name, "table"))
        if isinstance(table, str):
            full = table if "." in table else f"public.{table}"
            if (other := tables.setdefault(full, name)) != name:
                message = f"sinks.{name} and sinks.{other} have the same table"
                yield Breach(("sinks", name, "table"), message, "give each sink a table of its own")


def _sink(data: Mapping[str, Any], path: KeyPath) -> Iterator[Breach]:
    sink, name = value_at(data, path), key_text(path)
    if not isinstance(sink, Mapping):
        return
    upsert = sink.get("mode") == "upsert"
    if upsert and sink.get("key", ()) == ():
        message = f"{name}.key is {'empty' if 'key' in sink else 'missing'}"
        yield Breach((*path, "key"), message, "upsert needs the columns of a unique index: key: [flight_id]")
    if not upsert and "key" in sink and sink.get("mode", "append") == "append":
        yield Breach((*path, "key"), f"{name}.key has no use in an append sink", "remove the key", at_key=True)
    deletes = sink.get("deletes", "refuse") != "refuse"
    if upsert and deletes and "transform" not in data and value_at(data, ("format", "key")) in (None, "bytes"):
        fix = "say what the keys are, for example: format: {key: string}"
        yield Breach((*path, "deletes"), f"{name}.deletes needs format.key, because a record without a value has nothing but its key", fix)
    if not upsert and deletes:
        yield Breach((*path, "deletes"), f"{name}.deletes has no use in an append sink", "remove it, or write mode: upsert", at_key=True)
    value = value_at(data, ("format", "value"))
    if sink.get("evolve") == "add" and "transform" not in data and value in _STRUCTURED and value not in _SCHEMA_SUFFIXES:
        fix = "remove the key, and add columns with ALTER TABLE"
        yield Breach((*path, "evolve"), f"{name}.evolve needs a schema, and {value} is read without one", fix)


def _suites(data: Mapping[str, Any]) -> Iterator[Breach]:
    validation, sinks = data.get("validation"), data.get("sinks")
    if not isinstance(validation, Mapping):
        return
    if sinks is None:
        if "suites" in validation:
            fix = "name the suite of the table: suite: name"
            yield Breach(("validation", "suites"), "validation.suites has no use without sinks", fix, at_key=True)
        elif "suite" not in validation:
            yield Breach(("validation", "suite"), "validation.suite is missing", "name the suite: suite: name")
        return
    if "suite" in validation:
        fix = "write a suite for each sink: suites: {orders: orders, lines: order_lines}"
        yield Breach(("validation", "suite"), "validation.suite has no use with sinks", fix, at_key=True)
    elif not validation.get("suites"):
        fix = "write a suite for each sink: suites: {orders: orders, lines: order_lines}"
        yield Breach(("validation", "suites"), "validation.suites is missing", fix)
    suites = validation.get("suites")
    if isinstance(suites, Mapping) and isinstance(sinks, Mapping):
        for name in suites:
            if name not in sinks:
                near = nearest(str(name), [str(each) for each in sinks])
                fix = f"write {near}" if near else f"write one of {', '.join(map(str, sinks))}"
                yield Breach(("validation", "suites", name), f"{quoted(str(name))} is none of sinks", fix, at_key=True)


def _run_mode(data: Mapping[str, Any]) -> Iterator[Breach]:
    if "timezone" in data and data.get("schedule") is None:
        yield Breach(("timezone",), "timezone has no use without a schedule", "remove the key, or write a schedule", at_key=True)
    if data.get("run", "bounded") == "bounded" and "run_for" in data:
        yield Breach(("run_for",), "run_for has no use in a bounded run", "remove the key, or write run: continuous", at_key=True)
    if data.get("run") != "continuous":
        return
    if "schedule" in data:
        fix = "remove the key, and set the length of each run with run_for"
        yield Breach(("schedule",), "schedule has no use with run: continuous, where one run follows the other", fix, at_key=True)
    limit, run_for = _length(value_at(data, ("airflow", "execution_timeout"))), _length(data.get("run_for", "15m"))
    if limit and run_for and limit < run_for + HANDOVER:
        where = ("airflow", "execution_timeout")
        fix = f"write {format_duration(run_for + HANDOVER)} or more, or a shorter run_for"
        yield Breach(where, f"{key_text(where)} ends a continuous run before the next one can take over", fix)


def _length(value: Any) -> timedelta | None:
    try:
        return parse_duration(value) if isinstance(value, str) else None
    except BadInput:  # the value's own check reports it
        return None


def _lists(data: Mapping[str, Any]) -> Iterator[Breach]:
    """Lists that must not be empty, and lists without duplicates."""
    sinks = data["sinks"] if isinstance(data.get("sinks"), Mapping) else ()
    for key, fix in (("topics", "write at least one topic: [flights]"), ("assignment", "write at least one: [range]")):
        if data.get(key) == ():
            yield Breach((key,), f"{key} is empty", fix)
    lists: tuple[KeyPath, ...] = (
        ("topics",),
        ("assignment",),
        ("listeners",),
        ("sink", "key"),
        *(("sinks", name, "key") for name in sinks),
        ("retry", "permanent"),
        ("access", "edit"),
        ("access", "view"),
        ("airflow", "tags"),
    )
    for path in lists:
        entries = value_at(data, path)
        if not isinstance(entries, tuple):
            continue
        for index, entry in enumerate(entries):
            if isinstance(entry, str) and entry in entries[:index]:
                here = (*path, index)
                yield Breach(here, f'{key_text(here)} is a duplicate: "{entry[:80]}"', "remove one of them")


def _retries(data: Mapping[str, Any]) -> Iterator[Breach]:
    delays = value_at(data, ("retry", "delays"))
    lengths = [_length(delay) for delay in delays] if isinstance(delays, tuple) else []
    valid = [length for length in lengths if length is not None]
    for key in ("budget", "per_second", "order", "topics"):
        if value_at(data, ("retry", key)) is not None and not delays:
            message = f"retry.{key} has no use without retry.delays"
            yield Breach(("retry", key), message, "write delays: [5m, 30m, 1h], or remove the key", at_key=True)
    budget = _length(value_at(data, ("retry", "budget")))
    if budget and valid and budget < valid[0]:
        fix = f"write {format_duration(sum(valid, timedelta()))} for the whole ladder, or more than the first delay"
        yield Breach(("retry", "budget"), "retry.budget is shorter than the first delay, so nothing would be tried again", fix)
    group, topics = data.get("group"), data.get("topics")
    if not isinstance(group, str):
        return
    for index, length in enumerate(lengths):
        if length is not None and len(topic := max(retry_topic(group, length), now_topic(group), key=len)) > KAFKA_NAME_LIMIT:
            fix = f"its retry topic is {topic[:20]}...: give the group at most {KAFKA_NAME_LIMIT - len(topic) + len(group)} characters"
            yield Breach(("retry", "delays", index), "the group's name is too long for its retry topics", fix)
            break
    for index, topic in enumerate(topics if isinstance(topics, tuple) else ()):
        if isinstance(topic, str) and is_own(group, topic):
            fix = "remove it: tidemark retries drain reads it" if topic != failed_topic(group) else "remove it: it holds failed records"
            yield Breach(("topics", index), f'topics[{index}] is the consumer\'s own retry or failed topic: "{topic}"', fix)


def _order(data: Mapping[str, Any]) -> Iterator[Breach]:
    if value_at(data, ("retry", "max_held")) is not None and value_at(data, ("retry", "order")) != "key":
        message = "retry.max_held has no use without retry.order: key"
        yield Breach(("retry", "max_held"), message, "write order: key, or remove the key", at_key=True)


def _spark_conf(data: Mapping[str, Any]) -> Iterator[Breach]:
    conf = value_at(data, ("spark", "conf"))
    for name in conf if isinstance(conf, Mapping) else ():
        path = ("spark", "conf", name)
        if SECRET.search(name):
            yield Breach(path, f"{key_text(path)} may hold a secret", "put it in the connection", at_key=True)
        elif not name.startswith("spark."):
            yield Breach(path, f"{key_text(path)} is not a Spark setting", "write its full name: spark.executor.memory", at_key=True)


def _approval(data: Mapping[str, Any]) -> Iterator[Breach]:
    if value_at(data, ("rewind", "own")) is False and value_at(data, ("rewind", "approval")) == "none":
        message = "rewind.own: false has no use with rewind.approval: none"
        yield Breach(("rewind", "own"), message, "write approval: required, or remove the key", at_key=True)


def _access(data: Mapping[str, Any]) -> Iterator[Breach]:
    edit, view = value_at(data, ("access", "edit")), value_at(data, ("access", "view"))
    if not isinstance(edit, tuple) or not isinstance(view, tuple):
        return
    for index, role in enumerate(view):
        if isinstance(role, str) and role in edit:
            yield Breach(("access", "view", index), f"{quoted(role)} is in access.edit too, which includes view", "remove it here")


def _objectives(data: Mapping[str, Any]) -> Iterator[Breach]:
    slo = data.get("slo")
    if isinstance(slo, Mapping) and all(value is None for value in slo.values()):
        yield Breach(("slo",), "slo has no objective", "write {lag: 10m}, or remove the key")


def _schema_files(data: Mapping[str, Any]) -> Iterator[Breach]:
    format_ = data.get("format")
    if not isinstance(format_, Mapping):
        return
    for side in ("value", "key"):
        for name in (f"{side}_schema", f"{side}_message"):
            suffixes = _SCHEMA_SUFFIXES if name.endswith("schema") else {"protobuf": ".proto"}
            if name in format_ and format_.get(side) not in suffixes:
                message = f"{name} is given, but {side} is not {' or '.join(suffixes)}"
                yield Breach(("format", name), message, f"write {side}: {next(iter(suffixes))}, or remove {name}", at_key=True)
        file, suffix = format_.get(f"{side}_schema"), _SCHEMA_SUFFIXES.get(str(format_.get(side)))
        if isinstance(file, str) and suffix and not file.endswith(suffix):
            message = f"{side} is {format_[side]}, but {side}_schema is no {suffix} file"
            yield Breach(("format", f"{side}_schema"), message, f"name a {suffix} file in include/schemas")


_SCHEMA_SUFFIXES = {"avro": ".avsc", "protobuf": ".proto"}
_STRUCTURED = ("json", "json_schema", "avro", "protobuf")
"""Formats whose fields can become columns."""


def _without_code(data: Mapping[str, Any]) -> Iterator[Breach]:
    format_ = data.get("format")
    value = format_.get("value") if isinstance(format_, Mapping) else None
    if "transform" not in data:
        if value not in _STRUCTURED and "columns" not in data:
            fix = (
                "name the function, transform: module:function; or load fields without one: format: {value: avro}, protobuf or json; or "
                "load each value as a whole: columns: {payload: $value}"
            )
            yield Breach(("transform",), "transform is missing", fix)
        elif value not in _SCHEMA_SUFFIXES and "flatten" in data:
            fix = "name the fields in columns: {country: place.country}"
            yield Breach(("flatten",), f"flatten needs a schema, and {value} is read without one", fix, at_key=True)
        return
    for name in ("columns", "drop", "skip_if", "flatten"):
        if name in data:
            yield Breach((name,), f"{name} and transform are both given", "do it in the transform, or remove transform", at_key=True)


def _change_data(data: Mapping[str, Any]) -> Iterator[Breach]:
    format_ = data.get("format")
    if not isinstance(format_, Mapping) or "envelope" not in format_:
        fix = "write format: {value: avro, key: avro, envelope: debezium}, or name another field"
        columns, skip_if = (data[key] if isinstance(data.get(key), Mapping) else {} for key in ("columns", "skip_if"))
        for place, path in [
            *((("columns", name), path) for name, path in columns.items()),
            *((("skip_if", path), path) for path in skip_if),
        ]:
            if str(path).split(".")[0] == "$change":
                yield Breach(place, "$change needs format.envelope", fix, at_key=place[0] == "skip_if")
        return
    for side in ("value", "key"):
        if format_.get(side) not in _CHANGES:
            yield Breach(("format", side), f"format.{side} of change data is not {' or '.join(_CHANGES)}", f"write {side}: avro, or json")
    if "transform" in data:
        fix = "remove transform, or remove envelope and read the whole envelope in the transform"
        yield Breach(("format", "envelope"), "envelope and transform are both given", fix, at_key=True)
    sink = data.get("sink")
    if isinstance(sink, Mapping) and (sink.get("mode") != "upsert" or sink.get("deletes", "refuse") == "refuse"):
        fix = "write sink: {table: schema.table, mode: upsert, key: [id], deletes: hard}"
        yield Breach(("sink", "mode"), "change data needs an upsert sink with deletes", fix)


_CHANGES = ("avro", "json")
