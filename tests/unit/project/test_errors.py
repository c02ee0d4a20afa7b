"""Errors are sent from executors to the driver as bytes. Tested for every error class in the package, with sample values in its fields."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import re
import types
import typing
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import tidemark
from tidemark.errors import Broken, Fenced, Refused, TidemarkError, Unavailable
from tidemark.records.ranges import Epoch, Slice, TopicPartition

PARTITION = TopicPartition("flights", 3)
SAMPLES: dict[Any, Any] = {
    str: "said so",
    int: 7,
    float: 1.5,
    bool: True,
    bytes: b"Ulm",
    Path: Path("departures.yaml"),
    datetime: datetime(2026, 3, 29, tzinfo=UTC),
    TopicPartition: PARTITION,
    Slice: Slice(PARTITION, 1, 10, 20, Epoch(4)),
}


def modules_with_errors() -> list[str]:
    """Modules that define a class with a base class, except those that import Airflow. No heavy module is imported for the search."""
    library = Path(tidemark.__file__).parent
    files = [file for file in library.rglob("*.py") if "airflow" not in file.parts and re.search(r"(?m)^class \w+\(", file.read_text())]
    return [".".join(file.relative_to(library.parent).with_suffix("").parts).removesuffix(".__init__") for file in files]


def subclasses(cls: type[TidemarkError]) -> list[type[TidemarkError]]:
    return [each for sub in cls.__subclasses__() for each in (sub, *subclasses(sub)) if each.__module__.startswith("tidemark.")]


for name in modules_with_errors():
    importlib.import_module(name)
RAISED = {cls for cls in subclasses(TidemarkError) if not cls.__name__.startswith("_")} - {Refused, Fenced, Unavailable, Broken}
CLASSES = sorted(RAISED, key=lambda cls: (cls.__module__, cls.__name__))


def sample(kind: Any, choice: int) -> Any:
    """A sample value for an error's field of this type."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return None if choice and type(None) in inner else sample(inner[0], choice)
    if origin is typing.Literal:
        return inner[0]
    if origin in (list, tuple, frozenset):
        return origin([sample(inner[0], choice)])
    if origin is dict:
        return {sample(inner[0], choice): sample(inner[1], choice)}
    if isinstance(kind, typing.NewType):
        return sample(kind.__supertype__, choice)
    if dataclasses.is_dataclass(kind) and kind not in SAMPLES:
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: sample(hints[field.name], choice) for field in dataclasses.fields(kind)})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    return SAMPLES[kind]


def made(cls: type[TidemarkError], choice: int) -> TidemarkError:
    if not dataclasses.is_dataclass(cls):
        return cls()
    hints = typing.get_type_hints(cls)
    return cls(**{field.name: sample(hints[field.name], choice) for field in dataclasses.fields(cls)})


def test_the_walk_finds_the_errors() -> None:
    """Otherwise the tests below would check nothing."""
    assert {"OffsetFenced", "BadOutput", "SinkRejected", "RangeGone", "SpecInvalid", "TransformFailed"} <= {cls.__name__ for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickling_and_copying(cls: type[TidemarkError]) -> None:
    """Class, fields and text are preserved, with values or None in the fields. A custom constructor would lose them."""
    for error in (made(cls, 0), made(cls, 1)):
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(other), vars(other), str(other)) == (cls, vars(error), str(error))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_is_of_one_kind_and_says_something(cls: type[TidemarkError]) -> None:
    """The kind, or the class's ``retriable``, decides what a caller does. The text is a sentence that contains the values. Most errors have
    no name in Kafka, where one is written like ``OFFSET_OUT_OF_RANGE``."""
    kinds = [kind for kind in (Refused, Fenced, Unavailable, Broken) if issubclass(cls, kind)]
    if not cls.__subclasses__():  # a base class leaves this to its subclasses
        assert len(kinds) == 1 or "retriable" in vars(cls)
    assert len(kinds) <= 1
    error = made(cls, 0)
    assert str(error).strip()
    assert "<" not in str(error), "a field's repr"
    if dataclasses.is_dataclass(cls) and any(field.type in (str, "str") for field in dataclasses.fields(cls)):
        assert "said so" in str(error)
    assert cls.kafka_name is None or re.fullmatch(r"[A-Z]+(_[A-Z]+)+", cls.kafka_name)


def test_fields_are_given_by_keyword() -> None:
    """Positional arguments would not say what a value means."""
    for cls in CLASSES:
        if dataclasses.is_dataclass(cls) and dataclasses.fields(cls):
            with pytest.raises(TypeError):
                cls(*["a"] * len(dataclasses.fields(cls)))
