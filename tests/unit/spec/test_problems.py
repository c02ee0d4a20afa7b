"""Invalid files: all problems of a file are reported at once, with their places and what to write instead."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import BaseModel

from tidemark.spec import SpecInvalid, explain, load_consumer, model

SMALL = "topics: [flights]\ntransform: departures:transform\nsink: {table: departures}\n"  # three lines: the tested key is in the fourth


def refused(folder: Path, content: str | bytes, name: str = "departures.yaml") -> SpecInvalid:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecInvalid) as caught:
        load_consumer(path)
    return caught.value


@pytest.fixture
def consumers(tmp_path, monkeypatch):
    """A project's folder of consumers."""
    monkeypatch.setenv("TIDEMARK_HOME", str(tmp_path))
    folder = tmp_path / "include" / "consumers"
    folder.mkdir(parents=True)
    return folder


def test_all_problems_of_a_file_are_told_in_the_order_of_its_lines(consumers):
    """The whole output: place, problem, line, carets and fix; the most similar known key; the count and the consumer."""
    text = """\
group: departures
topics: flights
transform: departures.transform
sink: analytics.departures
retry: {permanent: [ValueError, 30 m, KeyEror]}
batch:
  max_records: 0
  max_record: 5
asignment: [range]
owner: air
"""
    assert (
        str(refused(consumers, text))
        == """\
include/consumers/departures.yaml:2:9: topics is not a list of topics: "flights"
    2 | topics: flights
      |         ^^^^^^^ write a list: [flights]
include/consumers/departures.yaml:3:12: transform is not module:function: "departures.transform"
    3 | transform: departures.transform
      |            ^^^^^^^^^^^^^^^^^^^^ write departures:transform
include/consumers/departures.yaml:4:7: sink is not a mapping: "analytics.departures"
    4 | sink: analytics.departures
      |       ^^^^^^^^^^^^^^^^^^^^ write {table: analytics.departures}
include/consumers/departures.yaml:5:33: retry.permanent[1] is not the name of an exception: "30 m"
    5 | retry: {permanent: [ValueError, 30 m, KeyEror]}
      |                                 ^^^^ write ValueError, or module.Class for one of your own
include/consumers/departures.yaml:5:39: retry.permanent[2] is not a built-in exception: "KeyEror"
    5 | retry: {permanent: [ValueError, 30 m, KeyEror]}
      |                                       ^^^^^^^ write KeyError, or module.Class for one of your own
include/consumers/departures.yaml:7:16: batch.max_records is not a number of records: 0
    7 |   max_records: 0
      |                ^ write a whole number from 1 to 10000000
include/consumers/departures.yaml:8:3: unknown key "max_record" in batch; did you mean "max_records"?
include/consumers/departures.yaml:9:1: unknown key "asignment"; did you mean "assignment"?
include/consumers/departures.yaml:10:1: unknown key "owner"; did you mean "airflow.owner"?
9 problems; departures was not loaded"""
    )


WRONG = [
    # the fourth line of the file, column and length of the place, message, fix
    ("group: a b", 8, 3, 'group is not a group id: "a b"', "use letters"),
    ("group: 12", 8, 2, "group is not a group id: 12", "in quotes"),
    (f"group: {'x' * 250}", 8, 250, "group is too long for a group id: 250 characters", "at most 249"),
    ("group:", 1, 5, "group is not a group id: nothing", "use letters"),
    ("description: [a]", 14, 3, "description is not text: a list", "write text"),
    ("topic_pattern: x", 1, 13, "topics and topic_pattern are both given", "keep one of them"),
    ("connections: {kafka: a b}", 22, 3, 'connections.kafka is not a connection id: "a b"', "write the id"),
    ("connections: {mysql: a}", 15, 5, 'unknown key "mysql" in connections', "known keys are postgres, kafka, spark, registry"),
    ("connections:", 1, 11, "connections is not a mapping: nothing", "or remove the key"),
    ("retry: {permanent: [KeyboardInterrupt]}", 21, 17, "retry.permanent[0] is not a built-in exception", "write"),
    ("retry: {permanent: [KeyError, KeyError]}", 31, 8, 'retry.permanent[1] is a duplicate: "KeyError"', "remove one"),
    ("retry: [5m]", 8, 4, "retry is not a mapping: a list", "write {delays: [5m, 30m, 1h]}"),
    ("retry: {delays: 5m}", 17, 2, 'retry.delays is not a list of durations: "5m"', "write a list: [5m]"),
    ("retry: {delays: [0s]}", 18, 2, "retry.delays[0] is zero", "longer than zero"),
    ("retry: {budget: 6h}", 9, 6, "retry.budget has no use without retry.delays", "write delays"),
    ("retry: {delays: [5m, 1h], budget: 1m}", 35, 2, "retry.budget is shorter than the first delay", "write 65m for the whole ladder"),
    ("retry: {delays: [5m], order: time}", 30, 4, 'retry.order is not an order: "time"', "write key or none"),
    ("retry: {order: key}", 9, 5, "retry.order has no use without retry.delays", "write delays"),
    ("retry: {delays: [5m], max_held: 9}", 23, 8, "retry.max_held has no use without retry.order: key", "write order: key"),
    ("retry: {breaker: {}}", 18, 1, "retry.breaker.ratio is missing", "ratio: 0.5"),
    ("retry: {breaker: {ratio: 1}}", 26, 1, "retry.breaker.ratio is not a ratio: 1", "from 0 to below 1"),
    ("retry: {breaker: {ratio: no}}", 26, 2, "retry.breaker.ratio is not a ratio: no", "from 0 to below 1"),
    ("offset_reset: first", 15, 5, 'offset_reset is not an offset reset: "first"', "write earliest, latest or none"),
    ("offset_reset: null", 15, 4, "offset_reset is empty: null", "write a value, or remove the key"),
    ("assignment: range", 13, 5, 'assignment is not a list of strategies: "range"', "write a list: [range]"),
    ("assignment: []", 13, 2, "assignment is empty", "write at least one"),
    ("assignment: [stiky]", 14, 5, 'assignment[0] is not an assignment strategy: "stiky"', "write sticky"),
    ("members: two", 10, 3, 'members is not a number of members: "two"', "1 or more"),
    ("members: true", 10, 4, "members is not a number of members: true", "1 or more"),
    ("members: 1.0", 10, 3, "members is not a number of members: 1.0", "1 or more"),
    ("members: 0", 10, 1, "members is not a number of members: 0", "1 or more"),
    ("run: no", 6, 2, "run is not a run mode: no", "write bounded or continuous"),
    ("run_for: 15m", 1, 7, "run_for has no use in a bounded run", "write run: continuous"),
    ("run_for: 15", 10, 2, "run_for is not a duration: 15", "30s, 5m, 1h"),
    ("batch: {max_records: 10000001}", 22, 8, "batch.max_records is not a number of records: 10000001", "from 1 to 10000000"),
    ("batch: {max_failed_records: -1}", 29, 2, "batch.max_failed_records is not a number of records: -1", "null for no limit"),
    ("schedule: '* * * *'", 11, 9, "schedule is not a cron schedule: it has 4 of 5 fields", "write five fields"),
    ("schedule: '* * * * * *'", 11, 13, "schedule is not a cron schedule: it has 6 of 5 fields", "write five fields"),
    ("schedule: '* 24 * * *'", 11, 12, 'schedule is not a cron schedule: the hour is "24"', "write five fields"),
    ("schedule: 'R * * * *'", 11, 11, 'schedule is not a cron schedule: the minute is "R"', "write five fields"),
    ("schedule: '0 0 31 2 *'", 11, 12, "schedule never comes due", "write a day that exists in its month"),
    ("schedule: '@dayly'", 11, 8, 'schedule is not an Airflow preset: "@dayly"', "write @daily"),
    ("schedule: 5", 11, 1, "schedule is not a schedule: 5", "write five fields in quotes"),
    ("timezone: Europe/Berln", 11, 12, 'timezone is not a time zone: "Europe/Berln"', "write Europe/Berlin"),
    ("timezone: ../../etc/passwd", 11, 16, "timezone is not a time zone", "write a name like Europe/Berlin"),
    ("timezone: 2", 11, 1, "timezone is not a time zone: 2", "write a name like Europe/Berlin"),
    ("timezone: Europe/Berlin", 1, 8, "timezone has no use without a schedule", "remove the key"),
    ("validation: {on_failure: block}", 13, 1, "validation.suite is missing", "suite: name"),
    ("validation: {suite: a.json}", 21, 6, 'validation.suite is a file, not a suite: "a.json"', "write a"),
    ("validation: {suite: a/b}", 21, 3, "validation.suite is not a suite's name", "without its extension"),
    ("validation: {suite: a, on_failure: stop}", 36, 4, "validation.on_failure is not a reaction", "write block, report or rewind"),
    ("airflow: {retries: 2.5}", 20, 3, "airflow.retries is not a number of retries: 2.5", "0 to 100"),
    ("airflow: {tags: x}", 17, 1, 'airflow.tags is not a list of tags: "x"', "write a list: [x]"),
    ("airflow: {tags: [x, 1]}", 21, 1, "airflow.tags[1] is not a tag: 1", "in quotes"),
    ("airflow: {owner: ' '}", 18, 3, "airflow.owner is empty", "write some text"),
    ("slo: 10m", 6, 3, 'slo is not a mapping: "10m"', "write {lag: 10m}"),
    ("slo: {}", 6, 2, "slo has no objective", "write {lag: 10m}, or remove the key"),
    ("slo: {lag: null}", 6, 11, "slo has no objective", "write {lag: 10m}, or remove the key"),
    ("slo: {lag: 0s}", 12, 2, "slo.lag is zero", "longer than zero"),
    ("slo: {failed: -1}", 15, 2, "slo.failed is not a number of records: -1", "0 or more"),
    ("access: team-orders", 9, 11, 'access is not a mapping: "team-orders"', "write {edit: [team-orders]"),
    ("access: null", 9, 4, "access is empty: null", "or remove the key"),
    ("access: {edit: team-orders}", 16, 11, 'access.edit is not a list of roles: "team-orders"', "write a list: [team-orders]"),
    ("access: {view: [1]}", 17, 1, "access.view[0] is not a role's name: 1", "the name of a role in Airflow"),
    ("access: {edit: ['a,b']}", 17, 5, "access.edit[0] is not a role's name", "without commas"),
    ("access: {edit: [a], view: [a]}", 28, 1, '"a" is in access.edit too, which includes view', "remove it here"),
    ("access: {edits: [a]}", 10, 5, 'unknown key "edits" in access; did you mean "edit"?', ""),
    ("spark: {conf: [a]}", 15, 3, "spark.conf is not a mapping: a list", "write {spark.executor.memory: 4g}"),
    ("spark: {conf: {executor.memory: 4g}}", 16, 15, 'spark.conf["executor.memory"] is not a Spark setting', "write its full name"),
    ("spark: {conf: {spark.x: [1]}}", 25, 3, 'spark.conf["spark.x"] is not text, a number or true/false: a list', "write one value"),
    ("spark: {conf: {spark.my.ACCESS_TOKEN: x}}", 16, 21, "", "put it in the connection"),  # logs and web pages show Spark's settings
    ("topicz: [a]", 1, 6, 'unknown key "topicz"; did you mean "topics"?', ""),
    ("suite: a", 1, 5, 'unknown key "suite"; did you mean "validation.suite"?', ""),
    ("name: departures", 1, 4, 'unknown key "name"', "known keys are group"),
    ("run: !!python/name:os.system bounded", 6, 31, "run has the YAML tag python/name:os.system", "without a tag"),
    ("run: &x [*x]", 6, 7, "run[0] contains itself", "instead of the alias"),
    ("<<: {run: bounded}", 1, 2, "merge keys (<<) are not supported", "write the keys out"),
    ("? [run]\n: bounded", 3, 5, "a key is a list or a mapping", "write a plain word"),
    ("partitions: {flights: 2-0}", 23, 3, 'partitions.flights is not a list of partitions: "2-0"', "write 0-2 for 2-0"),
    ("partitions: {flights: x}", 23, 1, 'partitions.flights is not a list of partitions: "x"', "write 0-2, or 0,4,7-9"),
    ("partitions: {flights: -1}", 23, 2, "partitions.flights is not a list of partitions: -1", "write 0-2, or 0,4,7-9"),
    ("partitions: {flights: yes}", 23, 3, "partitions.flights is not a list of partitions: yes", 'write 0-2, or "0,4,7-9" in quotes'),
    ("partitions: {flights: [0, 4]}", 23, 6, "partitions.flights is not a list of partitions: a list", 'write 0-2, or "0,4,7-9" in quotes'),
    ("partitions: 0-2", 13, 3, 'partitions is not a mapping: "0-2"', "write {flights: 0-2}"),
    ("partitions:", 1, 10, "partitions is empty: nothing", "write a value, or remove the key"),
    ("partitions: {}", 1, 10, 'partitions has no entry for "flights"', "add flights: 0-2"),
    ("partitions: {fligths: 0-2, flights: 0}", 14, 7, 'partitions names "fligths", which is not in topics', "write flights"),
    ("partitions: {orders: 0-2, flights: 0}", 14, 6, 'partitions names "orders", which is not in topics', "add the topic to topics"),
    ("partitions: {flights: 0-2}\nmembers: 3", 1, 10, "partitions cannot be combined with 3 members", "write members: 1"),
    ("rewind: {approval: never}", 20, 5, 'rewind.approval is not an approval setting: "never"', "write"),
    ("rewind: {approval: [none]}", 20, 6, "rewind.approval is not an approval setting: a list", "write"),
    ("rewind: {own: 0}", 15, 1, "rewind.own is not true or false: 0", "write"),
    ("rewind: {owm: true}", 10, 3, 'unknown key "owm" in rewind; did you mean "own"?', ""),
    ("rewind: {approval: none, own: false}", 26, 3, "rewind.own: false has no use with rewind.approval: none", "remove"),
    ("transform: other:transform", 1, 9, "transform is a duplicate, first in line 2", "remove one of them"),
]


def test_a_continuous_run_has_no_schedule_and_time_to_hand_over(tmp_path):
    text = f"{SMALL}run: continuous\nrun_for: 10m\nairflow: {{execution_timeout: 11m}}\n"
    first, second = refused(tmp_path, f"{text}schedule: '@hourly'\n").problems
    assert (first.line, first.column, first.fix) == (6, 30, "write 12m or more, or a shorter run_for")
    assert (second.line, second.message) == (7, "schedule has no use with run: continuous, where one run follows the other")
    (tmp_path / "departures.yaml").write_text(text.replace("11m", "12m"))
    assert load_consumer(tmp_path / "departures.yaml").run_for == timedelta(minutes=10)


@pytest.mark.parametrize(("line", "column", "length", "message", "fix"), WRONG, ids=[row[0][:40] for row in WRONG])
def test_a_wrong_value_is_pointed_at_and_told_with_its_fix(tmp_path, line, column, length, message, fix):
    """A wrong value is reported at the value, an unknown key at the key, and a missing key at the mapping that lacks it."""
    problems = [one for one in refused(tmp_path, f"{SMALL}{line}\n").problems if one.line == 4]
    found = [one for one in problems if message in one.message]
    assert found, problems
    assert (found[0].column, found[0].length) == (column, length)
    assert fix in found[0].fix
    assert bool(found[0].fix) is bool(fix)


SOURCES = [
    ("topics: []", "topics is empty", "write at least one topic"),
    ("topics: [a, a]", "topics[1] is a duplicate", "remove one"),
    ("topics: [a b]", 'topics[0] is not a topic\'s name: "a b"', "use letters"),
    ("topics: [..]", "topics[0] is not a topic's name", "Kafka refuses"),
    ("topics: [2024-01-01]", "topics[0] is not a topic's name: 2024-01-01", "in quotes"),
    ("topic_pattern: '('", "topic_pattern is not a regular expression (missing )", "matches whole topic names"),
    ("topic_pattern: ''", "topic_pattern is empty", "matches whole topic names"),
    ("group: a", "topics is missing", "name what to read"),
    ("topic_pattern: f-.*\npartitions: {f-eu: 0}", "partitions cannot be combined with topic_pattern", "name the topics"),
]


@pytest.mark.parametrize(("line", "message", "fix"), SOURCES, ids=[row[0] for row in SOURCES])
def test_a_consumer_says_in_one_way_what_it_reads(tmp_path, line, message, fix):
    """It is either a list of distinct topics with valid names or one regular expression."""
    (problem,) = refused(tmp_path, f"{line}\ntransform: departures:transform\nsink: {{table: departures}}\n").problems
    assert message in problem.message
    assert fix in problem.fix


TRANSFORMS = [
    ("departures", "write module:function"),
    ("air.departures.transform", "write air.departures:transform"),
    ("departures.py:transform", "write departures:transform"),
    ("air/departures.py:transform", "write air.departures:transform"),
    ("departures:a.b", "write module:function"),
    ("class:transform", "write module:function"),
]


@pytest.mark.parametrize(("name", "fix"), TRANSFORMS)
def test_a_transform_is_named_as_module_and_function(tmp_path, name, fix):
    """For a path or a dotted name, the error suggests the intended spelling."""
    (problem,) = refused(tmp_path, f"topics: [a]\ntransform: '{name}'\nsink: {{table: t}}\n").problems
    assert problem.message == f'transform is not module:function: "{name}"'
    assert problem.fix == fix


SINKS = [
    ("{table: Departures}", "sink.table is not a table's name"),
    ('{table: "my table"}', "sink.table is not a table's name"),
    ("{table: db.analytics.t}", "sink.table is not a table's name"),
    (f"{{table: {'x' * 64}}}", "sink.table is not a table's name: it has 64 bytes"),
    ("{table: 5}", "sink.table is not a table's name: 5"),
    ("{table: tidemark.batch}", "sink.table is in Tidemark's own schema"),
    ("{table: pg_catalog.pg_class}", "sink.table is in a schema of Postgres itself"),
    ("{}", "sink.table is missing"),
    ("{table: t, partitioned: true}", 'unknown key "partitioned" in sink'),
    ("{table: t, mode: replace}", 'sink.mode is not a mode: "replace"'),
    ("{table: t, key: [a]}", "sink.key has no use in an append sink"),
    ("{table: t, mode: upsert}", "sink.key is missing"),
    ("{table: t, mode: upsert, key: []}", "sink.key is empty"),
    ("{table: t, mode: upsert, key: a}", 'sink.key is not a list of columns: "a"'),
    ("{table: t, mode: upsert, key: [a, a]}", 'sink.key[1] is a duplicate: "a"'),
    ("{table: t, mode: upsert, key: [A]}", "sink.key[0] is not a column's name"),
    ("{table: t, evolve: widen}", 'sink.evolve is not a way to evolve: "widen"'),
]


@pytest.mark.parametrize(("sink", "message"), SINKS, ids=[row[0][:40] for row in SINKS])
def test_a_sink_is_a_table_that_postgres_names_without_quotes(tmp_path, sink, message):
    """The name is lower case, at most 63 bytes, not in a schema of Tidemark or Postgres. Upsert requires key columns; append has none. Each
    of several sinks is checked in the same way, and its problems name it."""
    problems = refused(tmp_path, f"topics: [a]\ntransform: m:f\nsink: {sink}\n").problems
    assert any(message in problem.message for problem in problems)
    assert {problem.line for problem in problems} == {3}
    several = refused(tmp_path, f"topics: [a]\ntransform: m:f\nsinks:\n  lines: {sink}\n  orders: {{table: shop.orders}}\n").problems
    of_lines = message.replace("sink.", "sinks.lines.").replace("in sink", "in sinks.lines")
    assert any(of_lines in problem.message for problem in several)
    assert {problem.line for problem in several} == {4}


@pytest.mark.parametrize("value", ["json", "json_schema"])
def test_table_that_is_the_schema_cannot_evolve(tmp_path, value):
    """With a transform or a schema, it can evolve."""
    text = f"topics: [a]\nformat: {{value: {value}}}\nsink: {{table: t, evolve: add}}\n"
    (problem,) = refused(tmp_path, text).problems
    assert (problem.line, problem.message) == (3, f"sink.evolve needs a schema, and {value} is read without one")
    for good in (text.replace(value, "avro"), f"{text}transform: m:f\n"):
        (tmp_path / "departures.yaml").write_text(good)
        assert load_consumer(tmp_path / "departures.yaml").evolving == ("public.t",)


ORDERS = "orders: {table: shop.orders}"
SEVERAL = [
    ("sinks: 5", "sinks is not a mapping: 5"),
    ("sinks: {}", "sinks is empty"),
    (f"sinks: {{{ORDERS}, lines: shop.lines}}", 'sinks.lines is not a mapping: "shop.lines"'),
    (f"sinks: {{{ORDERS}, Lines: {{table: shop.lines}}}}", '"Lines" is not a sink\'s name'),
    (f"sinks: {{{ORDERS}, {'x' * 41}: {{table: shop.lines}}}}", "is too long for a sink's name"),
    (f"sinks: {{{ORDERS}, lines: {{table: shop.orders}}}}", "sinks.lines and sinks.orders have the same table"),
    (f"sinks: {{{ORDERS}}}\nsink: {{table: shop.lines}}", "sink and sinks are both given"),
    ("", "sink is missing"),
    (f"sinks: {{{ORDERS}}}\nvalidation: {{suite: orders}}", "validation.suite has no use with sinks"),
    (f"sinks: {{{ORDERS}}}\nvalidation: {{on_failure: report}}", "validation.suites is missing"),
    (f"sinks: {{{ORDERS}}}\nvalidation: {{suites: {{order: orders}}}}", '"order" is none of sinks'),
    (f"sinks: {{{ORDERS}}}\nvalidation: {{suites: {{orders: a.json}}}}", "validation.suites.orders is a file, not a suite"),
    ("sink: {table: shop.orders}\nvalidation: {suites: {orders: a}}", "validation.suites has no use without sinks"),
    ("sink: {table: shop.orders}\nvalidation: {}", "validation.suite is missing"),
    (f"format: {{value: json}}\nsinks: {{{ORDERS}}}", "sinks needs a transform, which says what goes into which table"),
]


@pytest.mark.parametrize(("text", "message"), SEVERAL, ids=[row[1] for row in SEVERAL])
def test_sinks_and_their_suites_belong_together(tmp_path, text, message):
    """There is either one sink without a name, with one suite, or several with names, with suites by name. Without a transform, a record's
    fields go into one table."""
    text = f"topics: [a]\n{text}\n" + ("" if "format" in text else "transform: m:f\n")
    assert any(message in problem.message for problem in refused(tmp_path, text).problems)


SYNTAX = [
    (b"", 1, 1, "the file is empty"),
    (b"# nothing but a remark\n", 1, 1, "the file is empty"),
    (b"- topics\n", 1, 1, "the file is a list, not a mapping"),
    (b"topics\n", 1, 1, "the file is a plain value, not a mapping"),
    (b"group: a\ntopics: \xff\n", 2, 9, "the file is not UTF-8: byte 0xff"),
    (b"\xff\xfeg\x00", 1, 1, "the file is not UTF-8: byte 0xff"),
    (b"group: a\x00\n", 1, 9, "the file is not YAML: control character \\x00"),
    (b"sink:\n\ttable: a\n", 2, 1, "the file is not YAML: the line is indented with a tab"),
    (b"schedule: @daily\n", 1, 11, "the file is not YAML: a plain value cannot begin with this character"),
    (b"schedule: */5 * * * *\n", 1, 11, "the file is not YAML: * and & begin an alias or an anchor"),
    (b"group: *name\n", 1, 8, "the file is not YAML: this alias (*) has no anchor (&)"),
    (b"group: a: b\n", 1, 9, "the file is not YAML: a second colon cannot stand here"),
    (b"group: a\n run: b\n", 2, 5, "the file is not YAML: this colon cannot stand here"),
    (b"topics: [a\n\n\n", 1, 9, "the file is not YAML: a list that is not closed"),
    (b"sink: {table: t\n", 1, 7, "the file is not YAML: a mapping that is not closed"),
    (b"group: 'a\n", 1, 8, "the file is not YAML: a quote that is not closed"),
    (b"group: a\n---\ngroup: b\n", 2, 1, "the file has several documents (---)"),
    (b"topics: " + b"[" * 900, 1, 58, "the file is nested deeper than 50 levels"),
    (b"topics: " + b"{a: " * 100_000, 1, 205, "the file is nested deeper than 50 levels"),
    (b"x" * 1_000_001, 1, 1, "the file is not a consumer's file: it has more than 1,000,000 bytes"),
]


@pytest.mark.parametrize(("content", "line", "column", "message"), SYNTAX, ids=[f"{row[3]} {row[0][:12]!r}" for row in SYNTAX])
def test_what_is_no_yaml_mapping_is_told_in_the_same_shape(tmp_path, content, line, column, message):
    """There is one problem with its place and a fix, never a parser's traceback or a crash of the process."""
    (problem,) = refused(tmp_path, content).problems
    assert (problem.line, problem.column, problem.message) == (line, column, message)
    assert problem.fix


def test_many_aliases_of_aliases_are_answered_at_once(tmp_path):
    """Each value is built once, however many aliases name it, so a small file cannot fill the memory."""
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30)]
    error = refused(tmp_path, "\n".join(["l0: &l0 [x]", *levels, "topics: *l29", ""]))
    assert len(error.problems) < 50


@pytest.mark.parametrize("name", ["my consumer.yaml", "größe.yaml", f"{'x' * 242}.yaml"])
def test_a_file_is_named_as_a_dag_can_be(tmp_path, name):
    """The file's stem is the consumer's name and part of the DAG's id."""
    (problem,) = [one for one in refused(tmp_path, SMALL, name).problems if one.key == ""]
    assert "a consumer's name" in problem.message
    assert "rename the file" in problem.fix


@pytest.mark.parametrize(
    "line",
    [
        "spark: {conf: {spark.ssl.keyPassword: hunter2}}",
        "spark: {conf: {spark.ssl.keyPassword: [hunter2]}}",
        "spark: {conf: {spark.secret: 'hunter2', members: two}}",
        "connections: {kafka: {password: hunter2}}",
        "password: hunter2",
        "token: a: hunter2",
        "token: 'hunter2",
    ],
)
def test_a_secret_in_a_file_is_refused_and_not_repeated(tmp_path, line):
    """Neither the quoted line nor the message contains it, because errors are printed, logged and shown in Airflow."""
    error = refused(tmp_path, f"{SMALL}{line}\n")
    assert "hunter2" not in str(error)
    assert not any("hunter2" in repr(problem) for problem in error.problems)


def test_a_long_line_is_shown_around_its_place(tmp_path):
    """The excerpt fits on a screen, and the carets stay under the wrong value."""
    error = refused(tmp_path, f"topics: [{', '.join(f'topic-{n}' for n in range(100))}, a b]\ntransform: m:f\nsink: {{table: t}}\n")
    head, shown, caret, _ = str(error).splitlines()
    assert head.endswith('topics[100] is not a topic\'s name: "a b"')
    assert len(shown) < 170
    assert shown[caret.index("^") : caret.rindex("^") + 1] == "a b"


def _paths(kind: type[BaseModel], above: str = "") -> list[str]:
    paths = []
    for name, annotation in model.keys_of(kind).items():
        paths.append(f"{above}{name}")
        inner = explain._model_of(annotation) if name != "sinks" else None  # each sink has the same words as `sink`
        paths += _paths(inner, f"{above}{name}.") if inner else []
        paths += [f"{above}{name}.*"] if "Mapping[" in str(annotation) else [f"{above}{name}[]"] if "tuple[" in str(annotation) else []
    return paths


def test_every_key_has_words_of_its_own():
    """A key added to the model needs words, and a removed key has none."""
    assert set(_paths(model.ConsumerSpec)) == set(explain._TEXTS)
    assert set(explain._REQUIRED) == {"sink.table", "retry.breaker.ratio"}


@pytest.mark.parametrize(("topic", "fix"), [("retry.5m", "tidemark retries drain reads it"), ("failed", "it holds failed records")])
def test_consumer_does_not_read_its_own_retry_topics(tmp_path, topic, fix):
    """They hold records that it could not load. This also applies to a group that is named after the file."""
    text = SMALL.replace("topics: [flights]", f"topics: [flights, departures.{topic}]")
    (problem,) = refused(tmp_path, text).problems
    assert problem.message == f'topics[1] is the consumer\'s own retry or failed topic: "departures.{topic}"'
    assert problem.fix == f"remove it: {fix}"


def test_group_whose_name_leaves_no_room_for_its_retry_topics_is_refused(tmp_path):
    """Kafka allows 249 characters; the message says how many remain for the group."""
    fits = 249 - len(".retry.now")
    text = f"{SMALL}group: {'g' * (fits + 1)}\nretry: {{delays: [5m]}}\n"
    (problem,) = refused(tmp_path, text).problems
    assert (problem.key, problem.message) == ("retry.delays[0]", "the group's name is too long for its retry topics")
    assert problem.fix.endswith(f"give the group at most {fits} characters")
    (tmp_path / "departures.yaml").write_text(text.replace("g" * (fits + 1), "g" * fits))
    assert load_consumer(tmp_path / "departures.yaml").retry.delays == (timedelta(minutes=5),)
