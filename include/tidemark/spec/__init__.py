"""Consumer specs: one YAML file per consumer, checked as a whole and loaded as frozen values.

    >>> from tidemark.spec import read_folder
    >>> good, bad = read_folder()          # doctest: +SKIP

`load_consumer` reads a file, `read_folder` and `load_consumers` a folder, `find_consumer` one name in a folder. An invalid file is refused
with all of its problems at once (`SpecInvalid`): place, line, and what to write instead.

    model         declares the keys of the file, their types and defaults
    load          loads a file, a folder, or one consumer of a folder
    source        parses YAML and finds the place of each value
    checks        checks single values
    rules         checks that span several keys
    explain       turns Pydantic's errors into Tidemark's texts
    problem       holds the errors
    partial       reads what is readable of an invalid file
    scope         parses topics and partitions: `flights:0,1,5-9`
    retry_topics  names a group's retry topics and failed topic
    transform     imports the user's transform

    bytes ─ source ─▶ nodes with places ─▶ plain values ─┬─ model (each value) ── explain ─┐
                                                         └─ rules (across keys) ───────────┴─▶ ConsumerSpec, or problems

Checks that need more than the file (whether the topic or the suite exists) add their problems with `ConsumerSpec.problem`. Nothing here
reads Kafka or Postgres, so that a DAG file may call it. Only `tidemark.spec.transform` imports the user's code.
"""

from tidemark.spec.load import consumer_names, find_consumer, load_consumer, load_consumers, read_folder
from tidemark.spec.model import (
    AirflowSettings,
    Batch,
    Breaker,
    Connections,
    ConsumerSpec,
    OffsetReset,
    OnFailure,
    Order,
    Retry,
    RunMode,
    Sink,
    SinkMode,
    SparkSettings,
    Validation,
)
from tidemark.spec.partial import partial_spec
from tidemark.spec.problem import KeyPath, Problem, SpecInvalid, UnknownConsumer
from tidemark.spec.source import Source

__all__ = [
    "AirflowSettings",
    "Batch",
    "Breaker",
    "Connections",
    "ConsumerSpec",
    "KeyPath",
    "OffsetReset",
    "OnFailure",
    "Order",
    "Problem",
    "Retry",
    "RunMode",
    "Sink",
    "SinkMode",
    "Source",
    "SparkSettings",
    "SpecInvalid",
    "UnknownConsumer",
    "Validation",
    "consumer_names",
    "find_consumer",
    "load_consumer",
    "load_consumers",
    "partial_spec",
    "read_folder",
]
