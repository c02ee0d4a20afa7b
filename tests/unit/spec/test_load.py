"""Valid files, folders, and names: what `tidemark.spec` returns to code that reads consumers."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tidemark.errors import BadInput
from tidemark.records.outcome import ONLY
from tidemark.spec import (
    AirflowSettings,
    OffsetReset,
    OnFailure,
    RunMode,
    SinkMode,
    SpecInvalid,
    UnknownConsumer,
    consumer_names,
    files,
    find_consumer,
    load_consumer,
    partial_spec,
    read_folder,
)
from tidemark.spec.model import Approval

SMALL = "topics: [flights]\ntransform: departures:transform\nsink: {table: departures}\n"
FULL = """\
# every kind of value
group: departures-v2
description: Flights that left, as rows.
topics: [flights, flights.corrected]
transform: air.departures:transform
sink:
  table: analytics.departures
  mode: append
connections: {postgres: warehouse, kafka: events, spark: cluster}
retry: {permanent: [ValueError, departures.BadRow]}
offset_reset: none
assignment: [sticky, range]
members: 1
run: bounded
batch: {max_records: 1000, max_failed_records: 10}
schedule: "*/5 6-22 * * mon-fri"
validation: {suite: departures, on_failure: report}
airflow: {owner: air, tags: [flights, hourly], retries: 0, retry_delay: 5m, execution_timeout: 2h, pool: kafka}
spark:
  conf:
    spark.executor.memory: 4g
    spark.executor.cores: 2
    spark.memory.fraction: 0.5
    spark.speculation: yes
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "departures.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_small_file_gets_every_default(write):
    """Three keys are enough: the group is named after the file, the table is in schema public, and there is no limit or schedule."""
    spec = load_consumer(write(SMALL))
    assert (spec.name, spec.group, spec.topics, spec.topic_pattern) == ("departures", "departures", ("flights",), None)
    (sink,) = spec.sinks.values()
    assert (sink.table, sink.mode, sink.key) == ("public.departures", SinkMode.APPEND, ())
    assert (spec.connections.postgres, spec.connections.kafka, spec.connections.spark) == (
        "tidemark_postgres",
        "tidemark_kafka",
        "tidemark_spark",
    )
    assert (spec.retry.delays, spec.retry.permanent, spec.offset_reset, spec.validation, spec.schedule) == ((), (), None, None, None)
    assert (spec.members, spec.run, spec.batch.max_records, spec.batch.max_failed_records) == (1, RunMode.BOUNDED, 500_000, None)
    assert (spec.airflow.owner, spec.airflow.tags, spec.airflow.retries, spec.airflow.execution_timeout) == ("tidemark", (), 5, None)
    assert spec.airflow.retry_delay == timedelta(seconds=30)
    assert spec.spark.conf == {}


def test_a_full_file_is_read_as_it_stands(write):
    """Every key has a typed value. Spark's settings become text, as spark-submit expects them."""
    spec = load_consumer(write(FULL))
    assert (spec.name, spec.group, spec.topics) == ("departures", "departures-v2", ("flights", "flights.corrected"))
    assert spec.retry.permanent == ("ValueError", "departures.BadRow")
    assert spec.offset_reset is OffsetReset.NONE
    assert spec.assignment == ("sticky", "range")
    assert spec.validation is not None
    assert spec.validation.on_failure is OnFailure.REPORT
    assert spec.airflow.execution_timeout == timedelta(hours=2)
    assert spec.spark.conf == {
        "spark.executor.memory": "4g",
        "spark.executor.cores": "2",
        "spark.memory.fraction": "0.5",
        "spark.speculation": "true",
    }


def test_file_says_whether_a_rewind_needs_an_approval(write):
    """By default an approval is required, and anyone may give it, including the requester."""
    found = [load_consumer(write(SMALL + text)).rewind for text in ("", "rewind: {approval: none}\n", "rewind: {own: false}\n")]
    assert [(each.approval, each.own) for each in found] == [(Approval.REQUIRED, True), (Approval.NONE, True), (Approval.REQUIRED, False)]


def test_fixed_partitions_are_written_as_numbers_and_ranges(write):
    """YAML reads a single partition as a number, and a comma between braces needs quotes."""
    spec = load_consumer(write(SMALL + 'partitions: {flights: "7,0-2"}\n'))
    assert str(spec.fixed) == "flights:0-2,7"
    assert str(load_consumer(write(SMALL + "partitions:\n  flights: 3\n")).fixed) == "flights:3"
    assert str(load_consumer(write(SMALL)).fixed) == "all"
    assert hash(spec) == hash(copy.deepcopy(spec))


def test_a_spec_is_a_value(write):
    """Specs are frozen, compare and hash by value, and survive pickling and copying."""
    path = write(FULL)
    spec, twin = load_consumer(path), load_consumer(path)
    assert spec == twin
    assert hash(spec) == hash(twin)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert copy.deepcopy(spec) == spec
    with pytest.raises(ValidationError):
        spec.members = 2


def test_later_checks_add_problems_with_their_place(write):
    """A spec knows the place of each of its values. A default has the place of the mapping that could have set it."""
    spec = load_consumer(write(FULL))
    suite = spec.problem(("validation", "suites", ONLY), 'validation.suite: there is no suite "departures"', "write one that exists")
    assert (suite.line, suite.column, suite.length, suite.key) == (17, 21, 10, "validation.suite")
    topic = spec.problem(("topics", 1), "no such topic", "create it")
    assert (topic.line, topic.column, topic.length) == (4, 19, 17)
    missing = load_consumer(write(SMALL, "small.yaml")).problem(("sinks", ONLY, "mode"), "x", "y")
    assert (missing.line, missing.column) == (3, 7)
    assert [problem.line for problem in spec.invalid(suite, topic).problems] == [4, 17]


ACCEPTED = [
    *[f'schedule: "{one}"' for one in ("@hourly", "@continuous", "0 0 L * *", "0 0 * * MON#2", "5,10-20/2 * 1 jan,feb ?", "0 0 29 2 *")],
    "schedule: null",
    "batch: {max_failed_records: null}",
    "airflow: {execution_timeout: null, pool: null}",
    "airflow: {tags: *names}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_airflow_schedules_null_and_aliases_are_accepted(tmp_path, text):
    """Where None has a meaning, null may be written explicitly. A byte order mark and Windows line ends do no harm."""
    content = SMALL.replace("[flights]", "&names [flights]") + f"{text}\n"
    (tmp_path / "departures.yaml").write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    spec = load_consumer(tmp_path / "departures.yaml")
    assert spec.problem(("transform",), "x", "y").column == 12
    assert spec.airflow.tags == (spec.topics if "names" in text else ())
    assert spec.schedule == (text.split('"')[1] if '"' in text else None)


def test_a_folder_is_read_whatever_one_file_says(tmp_path, write):
    """The valid consumers are returned, sorted, and each invalid file has an error, which survives pickling. Other files and hidden files
    are ignored."""
    write(SMALL, "b.yaml")
    write(SMALL, "a.yml")
    write("topics: x\n", "bad.yaml")
    write("", "worse.yaml")
    write("", "notes.txt")
    write("", ".hidden.yaml")
    good, bad = read_folder(tmp_path)
    assert list(good) == ["a", "b"]
    assert [error.name for error in bad] == ["bad", "worse"]
    both = SpecInvalid(consumers=("bad", "worse"), problems=tuple(problem for error in bad for problem in error.problems))
    assert str(both).endswith("4 problems; bad, worse were not loaded")
    again = pickle.loads(pickle.dumps(both))
    assert (str(again), again.problems) == (str(both), both.problems)
    assert find_consumer("a", tmp_path) == good["a"]


LADDER = "retry: {delays: [5m]}\n"
CONFLICTS = {
    "two consumers would share offsets, even if one has other problems or a default group": (
        {"a.yaml": "group: c\n", "b.yaml": "group: c\nmembers: x\n", "c.yaml": "", "d.yaml": ""},
        ["d"],
        [
            'a.yaml:1:8: the group "c" is also claimed by b.yaml, c.yaml',
            'b.yaml:1:8: the group "c" is also claimed by a.yaml, c.yaml',
            'c.yaml:1:1: the group "c" is also claimed by a.yaml, b.yaml',
        ],
    ),
    "Kafka creates no topic whose name differs from another's only in dots and underscores": (
        {f"{name}.yaml": f"group: {group}\n{LADDER}" for name, group in (("a", "x.y"), ("b", "x_y"), ("c", "x-y"), ("d", "x.y.z"))},
        ["c", "d"],
        [
            'a.yaml:1:8: the retry topics of group "x.y" and of that in b.yaml have the same names but for "." and "_"',
            'b.yaml:1:8: the retry topics of group "x_y" and of that in a.yaml have the same names but for "." and "_"',
        ],
    ),
    "the name is also the DAG's": (
        {"a.yaml": "", "a.yml": ""},
        [],
        ['a.yaml:1:1: the consumer "a" is also declared in a.yml', 'a.yml:1:1: the consumer "a" is also declared in a.yaml'],
    ),
}


@pytest.mark.parametrize(("files", "kept", "messages"), CONFLICTS.values(), ids=CONFLICTS)
def test_files_in_conflict_are_all_refused(tmp_path, write, files, kept, messages):
    """Each error names the others. A task that reads only its own file gets the error too."""
    for name, text in files.items():
        write(text + SMALL, name)
    good, bad = read_folder(tmp_path)
    assert list(good) == kept
    first = [error.problems[0] for error in bad]
    assert [f"{one.file.name}:{one.line}:{one.column}: {one.message}" for one in first] == messages
    with pytest.raises(SpecInvalid):
        find_consumer("a", tmp_path)
    if "a.yml" not in files:
        assert load_consumer(tmp_path / "a.yaml").name == "a"


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path, write):
    """The error also lists all existing names."""
    write(SMALL, "departures.yaml")
    write(SMALL, "arrivals.yaml")
    with pytest.raises(UnknownConsumer) as caught:
        find_consumer("departurs", tmp_path)
    assert str(caught.value) == (
        f'there is no consumer "departurs" in {tmp_path}; did you mean "departures"? It has: arrivals, departures.'
    )


def test_a_missing_folder_is_refused(tmp_path):
    """An empty folder has no consumers; a folder that does not exist is an error."""
    assert read_folder(tmp_path) == ({}, [])
    with pytest.raises(BadInput):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(SpecInvalid, match=r"cannot be read: No such file"):
        load_consumer(tmp_path / "nothing.yaml")


def test_finding_a_consumer_reads_its_file_and_those_that_may_claim_its_group(tmp_path, write, monkeypatch):
    """A task needs one of a hundred consumers. A group that two files claim is still refused, however its name is written."""
    write(SMALL, "a.yaml")
    for name, group in (("b", "a"), ("c", '"\\x61"'), ("d", "a.other"), ("e", "e")):
        write(f"group: {group}\n{SMALL}", f"{name}.yaml")
    write(SMALL, "f.yaml")
    seen = []
    read = files.read
    monkeypatch.setattr(files, "read", lambda path: seen.append(path.stem) or read(path))
    assert find_consumer("f", tmp_path).name == "f"
    assert sorted(seen) == ["c", "f"], "c has an escape, so that its text does not tell which group it claims"
    with pytest.raises(SpecInvalid) as one:
        find_consumer("a", tmp_path)
    assert 'the group "a" is also claimed by b.yaml, c.yaml' in str(one.value)
    _, bad = read_folder(tmp_path, lambda name: name == "a")
    assert [str(error) for error in bad] == [str(one.value)]


def test_names_of_consumers_are_known_without_reading_their_files(tmp_path, write):
    write("{", "b.yaml")
    write(SMALL, "a.yml")
    write("", "notes.txt")
    assert consumer_names(tmp_path) == ["a", "b"]
    with pytest.raises(BadInput):
        consumer_names(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "broken",
    [
        "nonsense: 1\n",
        "members: x\n",
        "sink: {tabel: x}\n",
        "batch: {max_records: many}\n",
        "topics: [a, 7]\n",
        "x: {\n",
        "y: 'open\n",
        "\tz: 1\n",
    ],
)
def test_what_is_right_in_a_refused_file_is_kept(write, broken):
    """With unknown keys, wrong values, or text that is not YAML, other keys keep their values, and a wrong one gets its default."""
    kept = "group: g\nairflow: {owner: ann, tags: [gold], retries: no}\nschedule: '*/5 * * * *'\nconnections: {postgres: dwh}\n"
    path = write(broken + kept)
    with pytest.raises(SpecInvalid):
        load_consumer(path)
    spec = partial_spec(path)
    assert (spec.name, spec.group, spec.schedule, spec.connections.postgres) == ("departures", "g", "*/5 * * * *", "dwh")
    assert (spec.airflow.owner, spec.airflow.tags, spec.airflow.retries) == ("ann", ("gold",), AirflowSettings().retries)


@given(start=st.integers(0, len(FULL)), length=st.integers(0, 40), text=st.text(max_size=10))
def test_a_file_always_has_a_partial_spec(tmp_path_factory, start, length, text):
    """The DAG of a file stays, however the file is changed."""
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text(FULL[:start] + text + FULL[start + length :], encoding="utf-8", errors="replace")
    assert partial_spec(path).name == "mutated"


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"x" * 2_000_000, b"a: &a {b: *a}", b"two: 1\n---\nthree: 1"])
def test_a_file_of_anything_has_a_partial_spec(tmp_path, content):
    (tmp_path / "two words.yaml").write_bytes(content)
    assert partial_spec(tmp_path / "two words.yaml").group == "unknown"


@pytest.mark.parametrize(
    ("keys", "extras"),
    [
        ("", ["driver"]),
        ("format: {value: json}\n", ["driver"]),
        ("format: {value: avro}\n", ["driver", "avro", "registry"]),
        ("format: {value: avro, value_schema: city.avsc}\n", ["driver", "avro"]),
        ("format: {key: protobuf, value: string}\nvalidation: {suite: cities}\n", ["driver", "protobuf", "registry", "quality"]),
    ],
)
def test_consumer_needs_the_packages_of_its_formats_and_suites(keys: str, extras: list[str], tmp_path: Path) -> None:
    (tmp_path / "cities.yaml").write_text(SMALL + keys)
    assert load_consumer(tmp_path / "cities.yaml").extras == extras
