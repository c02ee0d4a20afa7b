"""What spans several keys, and what is not available yet. Pure functions over the file's mapping, checked or not.

They see the raw values, so that all of a file's problems come at once: a wrong ``members`` does not hide a missing ``topics``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidemark.spec.problem import SECRET, KeyPath, key_text


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: where, what is said, what to do. ``at_key``: the key is wrong, whatever its value."""

    path: KeyPath
    message: str
    fix: str
    at_key: bool = False


@dataclass(frozen=True, slots=True)
class NotYet:
    """A key whose value is understood, checked, and refused because nothing would act on it."""

    path: KeyPath
    applies: Callable[[Any], bool]
    why: str
    fix: str
    each: bool = False
    """The value is a list, and it is its entries that are judged."""


NOT_YET = (
    NotYet(
        ("retry", "delays"),
        bool,
        "there is no retry ladder; failed records are kept in tidemark.failed_record",
        "remove the key",
    ),
    NotYet(("run",), lambda value: value == "continuous", "every run ends at the end offsets it saw", "write bounded, and a schedule"),
    NotYet(
        ("validation", "on_failure"),
        lambda value: value == "rewind",
        "a failed validation does not move the group",
        "write block; a rewind can be started by hand",
    ),
)
"""The one list of what is refused until it is built. To make a key available, remove its entry."""


def findings(data: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _where_records_come_from(data)
    yield from _key_of_the_sink(data)
    yield from _lists(data)
    yield from _spark_conf(data)
    yield from _not_yet(data)


def _where_records_come_from(data: Mapping[str, Any]) -> Iterator[Finding]:
    both = ("topics" in data) + ("topic_pattern" in data)
    if both == 2:
        yield Finding(("topic_pattern",), "topics and topic_pattern are both given", "keep one of them", at_key=True)
    if both == 0:
        yield Finding(("topics",), "topics is missing", "say what to read: topics: [flights], or topic_pattern: flights-.*")


def _key_of_the_sink(data: Mapping[str, Any]) -> Iterator[Finding]:
    sink = data.get("sink")
    if not isinstance(sink, Mapping):
        return
    upsert = sink.get("mode") == "upsert"
    if upsert and "key" not in sink:
        yield Finding(("sink", "key"), "sink.key is missing", "upsert needs the columns of a unique index: key: [flight_id]")
    if upsert and sink.get("key") == ():
        yield Finding(("sink", "key"), "sink.key is empty", "upsert needs the columns of a unique index: key: [flight_id]")
    if not upsert and "key" in sink and sink.get("mode", "append") == "append":
        yield Finding(("sink", "key"), "sink.key has no use in an append sink", "remove the key", at_key=True)


def _lists(data: Mapping[str, Any]) -> Iterator[Finding]:
    """Lists that need an entry have one, and no entry of a list stands twice."""
    for key, fix in (("topics", "write at least one topic: [flights]"), ("assignment", "write at least one: [range]")):
        if data.get(key) == ():
            yield Finding((key,), f"{key} is empty", fix)
    lists: tuple[KeyPath, ...] = (
        ("topics",),
        ("assignment",),
        ("listeners",),
        ("sink", "key"),
        ("retry", "permanent"),
        ("airflow", "tags"),
    )
    for path in lists:
        entries = _at(data, path)
        if not isinstance(entries, tuple):
            continue
        for index, entry in enumerate(entries):
            if isinstance(entry, str) and entry in entries[:index]:
                here = (*path, index)
                yield Finding(here, f'{key_text(here)} stands twice: "{entry[:80]}"', "remove one of them")


def _spark_conf(data: Mapping[str, Any]) -> Iterator[Finding]:
    conf = _at(data, ("spark", "conf"))
    for name in conf if isinstance(conf, Mapping) else ():
        path = ("spark", "conf", name)
        if SECRET.search(name):
            yield Finding(path, f"{key_text(path)} may hold a secret", "put it in the connection", at_key=True)
        elif not name.startswith("spark."):
            yield Finding(path, f"{key_text(path)} is not a Spark setting", "write its full name: spark.executor.memory", at_key=True)


def _not_yet(data: Mapping[str, Any]) -> Iterator[Finding]:
    for one in NOT_YET:
        value = _at(data, one.path)
        entries = value if one.each and isinstance(value, tuple) else ()
        places = [((*one.path, index), entry) for index, entry in enumerate(entries)] if one.each else [(one.path, value)]
        for path, judged in places:
            if one.applies(judged):
                plain = judged if isinstance(judged, str | int) else None
                said = f"{key_text(path)}{'' if plain is None else f': {plain}'} is not available yet: {one.why}"
                yield Finding(path, said, one.fix)


def _at(data: Mapping[str, Any], path: KeyPath) -> Any:
    value: Any = data
    for part in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(str(part))
    return value
