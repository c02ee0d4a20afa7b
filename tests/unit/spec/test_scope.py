"""The text form of the partitions that a rewind moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.records.ranges import TopicPartition
from tidemark.spec.scope import Scope, spans

THERE = [*(TopicPartition("flights", number) for number in range(6)), TopicPartition("weather", 0)]


def chosen(*words: str) -> list[str]:
    return list(map(str, Scope.parse(words).select(THERE)))


@pytest.mark.parametrize(
    ("words", "partitions"),
    [
        ([], [*(f"flights/{number}" for number in range(6)), "weather/0"]),
        (["all"], [*(f"flights/{number}" for number in range(6)), "weather/0"]),
        (["weather"], ["weather/0"]),
        (["flights:0,1"], ["flights/0", "flights/1"]),
        (["flights:0,3-5"], ["flights/0", "flights/3", "flights/4", "flights/5"]),
        (["weather", "flights:5"], ["flights/5", "weather/0"]),
        (["weather flights:5"], ["flights/5", "weather/0"]),
        (["flights:1,1-2", "flights:2"], ["flights/1", "flights/2"]),
    ],
)
def test_scope_names_everything_topics_or_partitions(words, partitions):
    """Kafka's AllTopics, …ToEarliestOnOneTopic, …OneTopicAndPartition, …OnTopics, …OnTopicsAndPartitions; and ranges of partitions."""
    assert chosen(*words) == partitions


def test_all_that_is_not_there_is_named_with_what_is():
    with pytest.raises(BadInput) as caught:
        chosen("fligths", "flights:4-8", "weather:0,7")
    assert caught.value.found == "fligths, flights:6-8, weather:7 are not among the group's partitions"
    assert caught.value.fix == "Did you mean flights? The group reads flights:0-5, weather:0."
    with pytest.raises(BadInput, match="flights:0-999999999 is not among"):
        chosen("flights:0-999999999")  # a billion partitions are not counted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flights:9-7"], "Write 7-9 for 9-7."),
        (["flights:"], "Write all, flights, or flights:0,1,5-9."),
        (["flights/0"], "Write all, flights"),
        (["flights:-1", "ok", "a;b"], '"flights:-1", "a;b" do not name'),
        (["flights:0,,1"], "does not name"),
        (["x" * 250], "does not name"),
        (["all", "flights"], "all is next to flights"),
    ],
)
def test_what_is_no_scope_is_refused_with_what_to_write(words, message):
    with pytest.raises(BadInput, match=r".*") as error:
        Scope.parse(words)
    assert message in str(error.value)


def test_partitions_come_once_and_in_order_and_a_group_without_any_has_nothing_to_choose_from():
    assert Scope().select([*reversed(THERE), THERE[0]]) == THERE
    assert Scope().select([]) == []
    with pytest.raises(BadInput, match="reads no partitions"):
        Scope.parse(["flights"]).select([])


NUMBERS = st.sets(st.integers(0, 40), min_size=1)


@given(st.dictionaries(st.from_regex(r"\A[a-c._-]{1,5}\Z"), NUMBERS, min_size=1))
def test_scope_selects_exactly_the_numbers_that_were_written(wanted):
    """This holds for any topics and numbers, and the scope's text reads back as the same scope."""
    scope = Scope.parse([f"{topic}:{spans(numbers)}" for topic, numbers in wanted.items()])
    there = [TopicPartition(topic, number) for topic in wanted for number in range(50)]
    assert {(part.topic, part.partition) for part in scope.select(there)} == {
        (topic, n) for topic, all_of in wanted.items() for n in all_of
    }
    assert Scope.parse([str(scope)]) == scope


@given(st.sets(st.integers(0, 60)))
def test_spans_are_the_shortest_way_to_write_numbers(numbers):
    parts = [part.split("-") for part in spans(numbers).split(",") if part]
    assert sorted(n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)) == sorted(numbers)
    assert len(parts) == sum(number - 1 not in numbers for number in numbers)


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_words_are_read_or_refused_and_never_anything_else(words):
    try:
        scope = Scope.parse(words)
    except BadInput:
        return
    assert Scope.parse([str(scope)]) == scope
