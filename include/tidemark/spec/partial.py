"""Reads the valid part of an invalid consumer's file, so that its DAG keeps schedule, owner and tags, and drains know its group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tidemark.records.outcome import ONLY
from tidemark.spec import checks
from tidemark.spec.model import ConsumerSpec, written_out
from tidemark.spec.source import Parsed, Source, parse, read

UNKNOWN = "unknown"
UNKNOWN_TABLE = f"public.{UNKNOWN}"
"""The sink of a partial spec whose file has no valid sink."""
_REQUIRED: Mapping[str, Any] = {"transform": f"{UNKNOWN}:{UNKNOWN}", "sinks": {ONLY: {"table": UNKNOWN_TABLE}}}
_TOP_LEVEL_KEY = re.compile(r"^(?=[\w\"'])", re.MULTILINE)


def partial_spec(path: Path) -> ConsumerSpec:
    """The spec of a file, with defaults for invalid values. Never raises, whatever the file contains.

    If the file is not valid YAML, each top-level key that is valid by itself is read. The consumer must not run: missing values are
    placeholders, and rules that span several keys are not checked.
    """
    parsed = read(path)
    try:
        return _partial(path, parsed)
    except Exception:  # noqa: BLE001 - no error may keep other files from being loaded
        return ConsumerSpec.model_validate({"group": UNKNOWN, **_REQUIRED, "name": path.stem, "source": parsed.places.source})


def _partial(path: Path, parsed: Parsed) -> ConsumerSpec:
    data = written_out(dict(_blocks(parsed)) if parsed.data is None else parsed.data)
    try:
        group = checks.group_id(path.stem)
    except checks.InvalidValue:
        group = UNKNOWN
    while True:
        if not data.get("sinks"):
            data["sinks"] = _REQUIRED["sinks"]
        try:
            return ConsumerSpec.model_validate({"group": group, **_REQUIRED, **data, "name": path.stem, "source": parsed.places.source})
        except ValidationError as error:
            for problem in error.errors(include_url=False, include_context=False, include_input=False):
                data = _without(data, problem["loc"])


def _blocks(parsed: Parsed) -> Iterator[tuple[str, Any]]:
    """The top-level keys that are valid YAML by themselves, in an invalid file."""
    source = parsed.places.source
    for block in _TOP_LEVEL_KEY.split(source.text):
        yield from (parse(Source(source.path, block)).data or {}).items()


def _without(values: Mapping[str, Any], place: tuple[int | str, ...]) -> dict[str, Any]:
    """Removes the innermost mapping entry on the path ``place``."""
    key, *rest = place
    inner = values.get(str(key))
    if rest and isinstance(inner, Mapping) and rest[0] in inner:
        return {**values, str(key): _without(inner, tuple(rest))}
    return {name: value for name, value in values.items() if name != key}
