"""Turns Pydantic's errors into Tidemark's messages: for every key, the expected value and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tidemark.spec import model
from tidemark.spec.problem import MAX_PROBLEMS, SECRET, KeyPath, Problem, key_text, value_at
from tidemark.spec.source import Places
from tidemark.text.wording import nearest, quoted

_NAMES = 'letters, digits, ".", "_" and "-"'
_CONNECTION = ("is not a connection id", "write the id of an Airflow connection: tidemark_postgres")
_TEXTS: dict[str, tuple[str, str]] = {
    # key: (message for a value of the wrong type or out of range, fix). [] is any entry, * any key.
    "group": ("is not a group id", f"use {_NAMES}, in quotes if it is a number"),
    "description": ("is not text", "write text, in quotes if in doubt"),
    "topics": ("is not a list of topics", "write a list: [flights]"),
    "topics[]": ("is not a topic's name", f"use {_NAMES}, in quotes if it is a number"),
    "topic_pattern": ("is not a regular expression", "write one that matches whole topic names: flights-.*"),
    "partitions": ("is not a mapping", "write {flights: 0-2}, or remove the key"),
    "partitions.*": ("is not a list of partitions", 'write 0-2, or "0,4,7-9" in quotes'),
    "format": ("is not a mapping", "write {value: avro}, or remove the key"),
    "format.value": ("is not a format", "write bytes, string, json, json_schema, avro or protobuf"),
    "format.key": ("is not a format", "write bytes, string, json, json_schema, avro or protobuf"),
    "format.value_schema": ("is not a schema's file", "write the name of a file in include/schemas: order.avsc"),
    "format.key_schema": ("is not a schema's file", "write the name of a file in include/schemas: order.avsc"),
    "format.value_message": ("is not the name of a message", "write its full name: shop.Order"),
    "format.key_message": ("is not the name of a message", "write its full name: shop.Order"),
    "format.placeholder": ("is not text", "write the connector's unavailable.value.placeholder, in quotes if in doubt"),
    "format.envelope": ("is not an envelope", "write debezium, or remove the key"),
    "transform": ("is not module:function", "write module:function"),
    "columns": ("is not a mapping", "write a column and its field: {country: place.country}"),
    "columns.*": ("is not a field", "write a field's name: place.country, $key.id, or $timestamp"),
    "drop": ("is not a list of fields", "write a list: [debug]"),
    "drop[]": ("is not a field", "write a field's name: debug"),
    "skip_if": ("is not a mapping", "write fields and their values: {kind: test}, {kind: [test, ping]}"),
    "skip_if.*": ("is not a value or a list of values", "write text, numbers, true, false or null"),
    "flatten": ("is not text", "write what stands between two names: _"),
    "sink": ("is not a mapping", "write {table: schema.table}"),
    "sink.table": ("is not a table's name", "write schema.table"),
    "sink.mode": ("is not a mode", "write append or upsert"),
    "sink.key": ("is not a list of columns", "write a list: [flight_id]"),
    "sink.key[]": ("is not a column's name", "write it in lower case, as Postgres names it without quotes"),
    "sink.deletes": ("is not a way to delete", "write hard, soft or refuse"),
    "sink.evolve": ("is not a way to evolve", "write add or none"),
    "sink.error_detail": ("is not true or false", "write true or false"),
    "sinks": ("is not a mapping", "write {orders: {table: shop.orders}, lines: {table: shop.order_lines}}"),
    "sinks.*": ("is not a mapping", "write {table: schema.table}"),
    "mirror": ("is not true or false", "write true or false"),
    "connections": ("is not a mapping", "write {postgres: tidemark_postgres}, or remove the key"),
    "connections.postgres": _CONNECTION,
    "connections.kafka": _CONNECTION,
    "connections.spark": _CONNECTION,
    "connections.registry": _CONNECTION,
    "retry": ("is not a mapping", "write {delays: [5m, 30m, 1h]}, or remove the key"),
    "retry.delays": ("is not a list of durations", "write a list: [5m, 30m, 1h]"),
    "retry.delays[]": ("is not a duration", "write a number and a unit without a space: 30s, 5m, 1h"),
    "retry.budget": ("is not a duration", "write a number and a unit without a space, 6h, or null for no limit"),
    "retry.per_second": ("is not a number of records", "write a whole number, 1 or more, or null for no limit"),
    "retry.breaker": ("is not a mapping", "write {ratio: 0.5}, or remove the key"),
    "retry.breaker.ratio": ("is not a ratio", "write a number from 0 to below 1: 0.5"),
    "retry.breaker.minimum": ("is not a number of records", "write a whole number, 1 or more"),
    "retry.order": ("is not an order", "write key or none"),
    "retry.max_held": ("is not a number of records", "write a whole number, 1 or more"),
    "retry.topics": ("is not a mapping", "write {partitions: 1, replication: 3}, or remove the key"),
    "retry.topics.create": ("is not true or false", "write true or false"),
    "retry.topics.partitions": ("is not a number of partitions", "write a whole number, 1 or more"),
    "retry.topics.replication": ("is not a replication factor", "write a whole number, 1 or more, or null for the broker's default"),
    "retry.permanent": ("is not a list of exceptions", "write a list: [ValueError]"),
    "retry.permanent[]": ("is not the name of an exception", "write ValueError, or module.Class for one of your own"),
    "offset_reset": ("is not an offset reset", "write earliest, latest or none, or remove the key"),
    "assignment": ("is not a list of strategies", "write a list: [cooperative-sticky, range]"),
    "assignment[]": ("is not an assignment strategy", "write range, roundrobin, sticky or cooperative-sticky"),
    "members": ("is not a number of members", "write a whole number, 1 or more"),
    "listeners": ("is not a list of listeners", "write a list: [orders:Listener]"),
    "listeners[]": ("is not a listener", "write module:Class of your RebalanceListener"),
    "run": ("is not a run mode", "write bounded or continuous"),
    "run_for": ("is not a duration", "write a number and a unit without a space: 30s, 5m, 1h"),
    "rewind": ("is not a mapping", "write {approval: required}, or remove the key"),
    "rewind.approval": ("is not an approval setting", "write required or none"),
    "rewind.max_beside_rows": ("is not a number of rows", "write a whole number, 1 or more"),
    "rewind.own": ("is not true or false", "write true or false"),
    "batch": ("is not a mapping", "write {max_records: 500000}, or remove the key"),
    "batch.max_records": ("is not a number of records", "write a whole number from 1 to 10000000"),
    "batch.max_failed_records": ("is not a number of records", "write a whole number, 0 or more, or null for no limit"),
    "schedule": ("is not a schedule", 'write five fields in quotes, "*/5 * * * *", a preset, "@hourly", or null for none'),
    "timezone": ("is not a time zone", "write a name like Europe/Berlin, or UTC"),
    "validation": ("is not a mapping", "write {suite: name}, or remove the key"),
    "validation.suite": ("is not a suite's name", "write the name of a file in include/expectations, without its extension"),
    "validation.suites": ("is not a mapping", "write a suite for each sink: {orders: orders, lines: order_lines}"),
    "validation.suites.*": ("is not a suite's name", "write the name of a file in include/expectations, without its extension"),
    "validation.on_failure": ("is not a reaction to a failure", "write block, report or rewind"),
    "slo": ("is not a mapping", "write {lag: 10m}, or remove the key"),
    "slo.lag": ("is not a duration", "write a number and a unit without a space: 30s, 5m, 1h"),
    "slo.failed": ("is not a number of records", "write a whole number, 0 or more"),
    "slo.freshness": ("is not a duration", "write a number and a unit without a space: 30s, 5m, 1h"),
    "access": ("is not a mapping", "write {edit: [team-orders], view: [analysts]}, or remove the key"),
    "access.edit": ("is not a list of roles", "write a list: [team-orders]"),
    "access.edit[]": ("is not a role's name", "write the name of a role in Airflow: team-orders"),
    "access.view": ("is not a list of roles", "write a list: [analysts]"),
    "access.view[]": ("is not a role's name", "write the name of a role in Airflow: analysts"),
    "airflow": ("is not a mapping", "write {owner: data-team}, or remove the key"),
    "airflow.owner": ("is not an owner", "write a name: data-team"),
    "airflow.tags": ("is not a list of tags", "write a list: [flights]"),
    "airflow.tags[]": ("is not a tag", "write a word of at most 100 characters, in quotes if it is a number"),
    "airflow.retries": ("is not a number of retries", "write a whole number from 0 to 100"),
    "airflow.retry_delay": ("is not a duration", "write a number and a unit without a space: 30s, 5m, 1h"),
    "airflow.execution_timeout": ("is not a duration", "write a number and a unit without a space, 2h, or null for no limit"),
    "airflow.pool": ("is not a pool", "write the name of an Airflow pool, or remove the key"),
    "spark": ("is not a mapping", "write {conf: {spark.executor.memory: 4g}}, or remove the key"),
    "spark.conf": ("is not a mapping", "write {spark.executor.memory: 4g}"),
    "spark.shared": ("is not true or false", "write false to give the consumer's runs a Spark application of their own"),
    "spark.conf.*": ("is not text, a number or true/false", "write one value, in quotes if in doubt"),
}
_REQUIRED = {
    "sink.table": "name the table: table: schema.table",
    "retry.breaker.ratio": "write the share of records that may fail: ratio: 0.5",
}


def explain(error: ValidationError, data: Mapping[str, Any], places: Places) -> list[Problem]:
    """Translates Pydantic's errors to problems, at most `MAX_PROBLEMS`. Never shows Pydantic's own messages."""
    errors = error.errors(include_url=False)[:MAX_PROBLEMS]
    return [_problem(item["type"], model.in_file(item["loc"]), item.get("ctx", {}), data, places) for item in errors]


def _problem(kind: str, path: KeyPath, context: dict[str, Any], data: Mapping[str, Any], places: Places) -> Problem:
    if kind == "extra_forbidden":
        return unknown_key(path, places)
    pattern = _pattern(path)
    if kind == "missing":
        return places.problem(path, f"{key_text(path)} is missing", _REQUIRED[pattern])
    clause, fix = (context["clause"], context["fix"]) if kind == "invalid_value" else _TEXTS[pattern]
    if kind != "invalid_value":
        fix = _fix_for(pattern, value_at(data, path)) or fix
    value = "" if SECRET.search(key_text(path)) else f": {places.describe(path)}"
    return places.problem(path, f"{key_text(path)} {clause}{value}", fix)


def unknown_key(path: KeyPath, places: Places) -> Problem:
    """Suggests the known key of this name elsewhere in the file, else this mapping's closest key, else all of its keys."""
    *above, last = path
    inside = key_text(tuple(above))
    message = f"unknown key {quoted(str(last))}{f' in {inside}' if inside else ''}"
    known_keys = _keys(tuple(above))
    near = next((key for key in _TEXTS if key.rpartition(".")[2] == last), None) or nearest(str(last), known_keys)
    if near:
        return places.problem(path, f'{message}; did you mean "{near}"?', "", at_key=True)
    return places.problem(path, message, f"remove it; known keys are {', '.join(known_keys)}", at_key=True)


def _fix_for(pattern: str, value: Any) -> str | None:
    """A fix that contains the user's value, for a single word in place of a list or a mapping."""
    if not isinstance(value, str) or not value or len(value) > 60:
        return None
    if f"{pattern}[]" in _TEXTS:
        return f"write a list: [{value}]"
    return (
        f"write {{table: {value}}}" if pattern in ("sink", "sinks.*") else f"write {{suite: {value}}}" if pattern == "validation" else None
    )


def _keys(above: KeyPath) -> tuple[str, ...]:
    kind: type[BaseModel] | None = model.ConsumerSpec
    for at, part in enumerate(above):
        if at != 1 or above[0] != "sinks":  # the name of a sink
            kind = _model_of(model.keys_of(kind)[str(part)]) if kind else None
    return tuple(model.keys_of(kind)) if kind else ()


def _model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _pattern(path: KeyPath) -> str:
    """The key in `_TEXTS`."""
    if path[:1] == ("sinks",) and len(path) > 2:
        path = ("sink", *path[2:])
    pattern = ""
    for part in path:
        if f"{pattern}.*" in _TEXTS:
            return f"{pattern}.*"
        pattern += "[]" if isinstance(part, int) else f".{part}" if pattern else part
    return pattern
