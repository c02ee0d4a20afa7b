"""Consumers as users declare them: one YAML file each, checked as a whole and loaded as frozen values.

    >>> from tidemark.spec import read_folder
    >>> good, bad = read_folder()          # doctest: +SKIP

`load_consumer` reads a file, `read_folder` a folder, `find_consumer` one name of a folder. A bad file is refused with all of its problems
at once (`SpecInvalid`): the place, the line, the fix. `model` has the keys of the file.

    bytes ─ source ─▶ nodes with places ─▶ plain values ─┬─ model (each value) ── explain ─┐
                                                         └─ rules (across keys) ───────────┴─▶ ConsumerSpec, or problems

Checks that need more than the file (whether the topic or the suite exists) report with `ConsumerSpec.problem`. Nothing here reads Kafka or
Postgres or imports the user's code, so a DAG file may call it; only `tidemark.spec.user_transform` imports a transform.

Modules::

    checks          checks of single values
    explain         pydantic's errors as messages with a fix
    files           files and folders to consumers
    model           the keys, their types and defaults
    partial         the readable part of a refused file
    problem         a problem with its place in the file
    retry_topics    the names of a group's retry topics
    rules           checks across several keys
    scope           parses topics and partitions such as `flights:0,1,5-9`
    source          YAML nodes with their places
    user_transform  loads a user's transform and recognizes its form
"""

from tidemark.spec.files import consumer_names, find_consumer, load_consumer, read_folder
from tidemark.spec.model import (
    AirflowSettings,
    Batch,
    ConsumerSpec,
    Objectives,
    OffsetReset,
    OnFailure,
    RetryOrder,
    RunMode,
    Sink,
    SinkMode,
    Validation,
)
from tidemark.spec.partial import partial_spec
from tidemark.spec.problem import Problem, SpecInvalid, UnknownConsumer

__all__ = [
    "AirflowSettings",
    "Batch",
    "ConsumerSpec",
    "Objectives",
    "OffsetReset",
    "OnFailure",
    "Problem",
    "RetryOrder",
    "RunMode",
    "Sink",
    "SinkMode",
    "SpecInvalid",
    "UnknownConsumer",
    "Validation",
    "consumer_names",
    "find_consumer",
    "load_consumer",
    "partial_spec",
    "read_folder",
]
