"""A rewind's scenarios in three forms: Kafka's option names, JSON, and a sentence."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemark.errors import BadInput, Refused
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import (
    Adopt,
    ByDuration,
    FromFile,
    FromGroup,
    Scenario,
    ShiftBy,
    ToBatch,
    ToCurrent,
    ToDatetime,
    ToEarliest,
    ToLatest,
    ToOffset,
    ToValidated,
    Undo,
)
from tidemark.rewind.scenarios.scenario import EXPIRES_IN, SCENARIO_OPTIONS, describe, from_json, parse, parse_expiry, to_json
from tidemark.text.problems import Problems, SeveralProblems, check_reason
from tidemark.text.storable import BIGINT, INTEGER

RUN = "scheduled__2026-03-29T12:00:00+00:00"
SAID = [
    (("to-earliest", None), ToEarliest(), "Continue at the first record that Kafka still has."),
    (("to-latest", ""), ToLatest(), "Continue after the last stable record."),
    (("to-current", None), ToCurrent(), "Stay where the group is; running attempts are fenced and claim again."),
    (("to-offset", "1200"), ToOffset(1200), "Continue at offset 1,200 of each partition."),
    (("shift-by", "+50"), ShiftBy(50), "Continue 50 offsets ahead."),
    (("shift-by", "-1"), ShiftBy(-1), "Continue 1 offset back."),
    (
        ("to-datetime", "2026-03-29T12:00:00Z"),
        ToDatetime(datetime(2026, 3, 29, 12, tzinfo=UTC)),
        "Continue at the first record at or after 2026-03-29T12:00:00Z.",
    ),
    (("by-duration", "PT2H"), ByDuration(timedelta(hours=2)), "Continue at the first record within PT2H before the plan was made."),
    (("from-group", "departures"), FromGroup("departures"), "Continue where group departures is."),
    (
        ("from-group", "kafka:old one:2"),
        FromGroup("old one:2", kafka=True),
        "Continue at the offsets that group old one:2 committed to Kafka.",
    ),
    (("to-validated", None), ToValidated(), "Continue at the end of the validated rows."),
    (("to-batch", "1234"), ToBatch(1234), "Continue just before batch 1234."),
    (
        ("to-batch", f"consume__departures/{RUN}"),
        ToBatch(dag_id="consume__departures", run_id=RUN),
        f"Continue just before all batches of run {RUN} of consume__departures.",
    ),
    (("undo", "17"), Undo(17), "Undo rewind 17: restore offsets and rows as they were before it."),
]


@pytest.mark.parametrize(("words", "scenario", "sentence"), SAID, ids=[" ".join(filter(None, words)) for words, _, _ in SAID])
def test_words_mean_a_scenario_that_is_told_in_a_sentence(words, scenario, sentence):
    """The names are those of Kafka's tool, or ours if it has none, in upper or lower case."""
    assert parse(*words) == parse(words[0].upper(), words[1]) == scenario
    assert (describe(scenario), scenario.name) == (sentence, words[0])


def test_file_is_read_for_the_groups_that_move():
    """A plan may have the offsets of several groups."""
    contents = '"g1","flights",0,5\n"g2","flights",1,6\n'
    wanted = FromFile({TopicPartition("flights", 0): 5})
    assert parse("from-file", "plan.csv", groups=["g1"], contents=contents) == wanted
    assert parse("from-file", contents="flights,0,5\n", groups=["g1"]) == wanted
    assert describe(wanted) == "Continue at the offsets in a file, for 1 partition."
    with pytest.raises(Refused, match="has no offsets for g3"):
        parse("from-file", groups=["g3"], contents=contents)


@pytest.mark.parametrize("name", ["from-file", "FROM-FILE", " from-file\n", "From-File"])
def test_no_file_is_opened_however_the_scenario_is_written(tmp_path, name):
    """The page passes what a user's browser sends: a file of the api-server's machine must not be read, nor its existence shown."""
    (tmp_path / "there.csv").write_text("flights,0,5\n")
    for file in ("there.csv", "missing.csv"):
        with pytest.raises(BadInput, match="the contents of the file are missing"):
            parse(name, str(tmp_path / file))


def test_every_scenario_has_a_word_and_every_word_a_scenario():
    """A scenario added to the model needs a name, a sentence and JSON. An adoption has a separate command."""
    assert {type(scenario) for _, scenario, _ in SAID} | {FromFile, Adopt} == set(get_args(Scenario))
    assert {words[0] for words, _, _ in SAID} | {"from-file"} == set(SCENARIO_OPTIONS)


def test_adoption_has_a_sentence_and_comes_back_from_json():
    assert describe(Adopt("old")) == "Start where group old has committed in Kafka; where it has committed nothing, as offset_reset says."
    assert to_json(Adopt("old")) == {"scenario": "adopt", "group": "old"}
    assert from_json(to_json(Adopt("old"))) == Adopt("old")


@pytest.mark.parametrize("name", [name for name, word in SCENARIO_OPTIONS.items() if word.value and name != "from-file"])
def test_example_of_each_word_is_a_good_value(name):
    """The examples in errors and forms are valid and can be copied."""
    assert parse(name, SCENARIO_OPTIONS[name].example, zone="Europe/Berlin" if name == "to-datetime" else None).name == name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("to-earlist", None), '"to-earlist" does not exist. Write to-earliest.'),
        (("whenever", None), "Write one of to-earliest, to-latest, to-current,"),
        (("to-earliest", "5"), 'it takes no value, but "5" was given'),
        (("to-offset", None), "it needs an offset. Write 1200."),
        (("to-offset", "-1"), "Write a whole number, 0 or greater: 1200."),
        (("to-offset", str(BIGINT + 1)), "is not an offset"),
        (("to-offset", "1_000"), "is not an offset"),
        (("to-offset", "٣"), "is not an offset"),
        (("shift-by", "1.5"), "Write a whole number, optionally with + or -: -500."),
        (("to-datetime", "2026-03-29 14:00"), "has no zone"),
        (("by-duration", "P1M"), "contains months or years"),
        (("from-file", "/no/such/file.csv"), "the contents of the file are missing"),
        (("from-group", "kafka:"), "names no group"),
        (("to-batch", "a"), "is neither a batch nor DAG/RUN"),
        (("to-batch", "dag/"), "is neither a batch nor DAG/RUN"),
        (("to-batch", "0"), "Write a whole number, 1 or greater"),
        (("undo", "last"), "is not a rewind"),
    ],
)
def test_what_is_no_scenario_is_refused_with_what_to_write(words, told):
    with pytest.raises(BadInput) as error:
        parse(*words)
    assert told in str(error.value)


def test_all_problems_come_at_once():
    with pytest.raises(SeveralProblems) as told:
        parse("to-offset", "x", zone="Europe/Berlin", contents="flights,0,1")
    assert str(told.value).splitlines() == [
        "zone: to-offset does not use a time zone. Omit it; only to-datetime takes a local time.",
        "offsets: to-offset does not use offsets from a file. Omit them; only from-file takes them.",
        'to-offset: "x" is not an offset. Write a whole number, 0 or greater: 1200.',
        "3 problems; nothing was planned",
    ]


def test_problems_of_problems_are_one_list():
    """Each problem is collected once, even if several come in one error. Without problems, nothing is raised."""
    problems = Problems()
    problems.attempt(lambda: parse("to-latest", "5", zone="UTC"))
    assert problems.attempt(lambda: parse("to-latest")) == ToLatest()
    problems.attempt(lambda: check_reason("short"))
    with pytest.raises(SeveralProblems) as told:
        problems.end()
    assert len(told.value.problems) == 3
    Problems().end()


@pytest.mark.parametrize(
    ("reason", "problem"),
    [(None, "it is missing"), ("", "it is missing"), ("x", '"x" has 1 character'), ("  a   b   c  ", '"a b c" has 5 characters')],
)
def test_reason_of_less_than_ten_characters_is_refused(reason, problem):
    """Repeated spaces count once."""
    with pytest.raises(BadInput, match=f"{problem}. Say why in at least 10 characters"):
        check_reason(reason)


def test_reason_is_one_line():
    assert check_reason("  a bug in\n the   transform ") == "a bug in the transform"


def test_expiry_is_a_length_of_time():
    """It is written as in a consumer's file, or in ISO 8601."""
    assert parse_expiry("30m") == parse_expiry("PT30M") == timedelta(minutes=30)
    assert parse_expiry(None) == parse_expiry(" ") == EXPIRES_IN
    for text in ("soon", "0s", "P1M", "99999d"):
        with pytest.raises(BadInput, match="Write 30m, 4h, or 2d"):
            parse_expiry(text)


PARTITIONS = st.builds(TopicPartition, st.text("ab._-", min_size=1, max_size=5), st.integers(0, INTEGER))
SCENARIOS = st.one_of(
    st.sampled_from([ToEarliest(), ToLatest(), ToCurrent(), ToValidated()]),
    st.builds(ToOffset, st.integers(0, BIGINT)),
    st.builds(ShiftBy, st.integers(-BIGINT, BIGINT)),
    st.builds(ToDatetime, st.datetimes(timezones=st.just(UTC))),
    st.builds(ByDuration, st.timedeltas(min_value=timedelta(), max_value=timedelta(days=100_000))),
    st.builds(FromFile, st.dictionaries(PARTITIONS, st.integers(0, BIGINT))),
    st.builds(FromGroup, st.text(min_size=1), st.booleans()),
    st.builds(ToBatch, st.integers(1, BIGINT)),
    st.builds(ToBatch, st.none(), st.text(min_size=1), st.text(min_size=1)),
    st.builds(Undo, st.integers(1, BIGINT)),
)


@given(SCENARIOS)
def test_any_scenario_survives_json(scenario):
    """A stored scenario equals the planned one, to the microsecond, and every scenario has a sentence."""
    assert from_json(json.loads(json.dumps(to_json(scenario)))) == scenario
    assert describe(scenario).endswith(".")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
NAMES = st.sampled_from(["offset", "offsets", "moment", "duration", "group", "kafka", "batch_id", "dag_id", "run_id", "rewind_id"])


@example({"scenario": "to-batch", "batch_id": [], "dag_id": []})
@given(
    ANYTHING
    | st.builds(
        lambda name, values: {"scenario": name, **values},
        st.sampled_from([*SCENARIO_OPTIONS, "undo", "adopt"]),
        st.dictionaries(NAMES, ANYTHING),
    )
)
def test_anything_that_a_role_may_have_stored_is_a_scenario_or_refused(stored):
    try:
        scenario = from_json(stored)
    except BadInput as refused:
        assert "stored scenario" in str(refused)  # noqa: PT017 - most of what is generated is refused
    else:
        assert describe(scenario)
        assert from_json(to_json(scenario)) == scenario


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"scenario": "to-the-moon"},
        {"scenario": "to-offset"},
        {"scenario": "to-offset", "offset": 1, "more": 2},
        {"scenario": "to-datetime", "moment": "noon"},
        {"scenario": "by-duration", "duration": "long"},
        {"scenario": "from-file", "offsets": [[1]]},
        {"scenario": ["to-offset"]},
    ],
)
def test_stored_scenario_of_another_kind_is_refused(stored):
    """A newer Tidemark may have more scenarios; nothing is guessed."""
    with pytest.raises(BadInput, match="Use the Tidemark version that stored it"):
        from_json(stored)
