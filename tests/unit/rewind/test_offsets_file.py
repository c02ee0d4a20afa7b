"""Files of offsets: exports of Kafka's tool, and the problems of other files."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark.errors import BadInput
from tidemark.records.ranges import TopicPartition
from tidemark.rewind.scenarios.offsets_file import MAX_BYTES, OffsetsFileInvalid, offsets_for_groups, parse_offsets, read_text
from tidemark.text.storable import BIGINT, INTEGER

P0, P1 = TopicPartition("flights", 0), TopicPartition("flights", 1)


def test_export_of_one_group_has_topic_partition_offset():
    """Kafka's testExportImportPlanSingleGroupArg. Kafka's CSV writer quotes names of more than 24 characters."""
    long = TopicPartition("a-topic-with-more-than-24-letters", 3)
    assert parse_offsets(f'flights,0,1200\nflights,1,0\n"{long.topic}",3,{BIGINT}\n') == {None: {P0: 1200, P1: 0, long: BIGINT}}


def test_export_of_several_groups_has_the_group_first():
    """Kafka's testExportImportPlan."""
    assert parse_offsets('"g1","flights",0,5\n"g2","flights",0,6\n') == {"g1": {P0: 5}, "g2": {P0: 6}}


@pytest.mark.parametrize(
    "text",
    ["flights,0,5\r\n", "\ufeffflights,0,5", "topic,partition,offset\nflights,0,5\n", '\n\n "flights", 0 , 5 \n\n', '"flights","0","5"\n'],
)
def test_what_editors_and_spreadsheets_do_to_a_file_is_no_matter(text):
    """Windows line endings, a byte order mark, a header, blank lines, spaces, and quotes around every value."""
    assert parse_offsets(text) == {None: {P0: 5}}


def test_everything_that_is_wrong_with_a_file_is_told_at_once(tmp_path):
    file = tmp_path / "plan.csv"
    contents = 'flights,0,5\nflights,x,-1\nflights,0,6\nfl ights,1,1\ng,flights,2,2\n{"topic": 1}\n'
    with pytest.raises(OffsetsFileInvalid) as told:
        parse_offsets(contents, file)
    assert str(told.value) == EXPECTED.format(file=file)


EXPECTED = """\
{file}:2:9: the partition is "x"
    2 | flights,x,-1
      |         ^ write a whole number from 0 to 2147483647
{file}:2:11: the offset is "-1"
    2 | flights,x,-1
      |           ^^ write a whole number from 0 to 9223372036854775807
{file}:3:1: flights/0 appears twice: line 1 has it too
    3 | flights,0,6
      | ^^^^^^^^^^^ remove one of them
{file}:4:1: the topic is "fl ights"
    4 | fl ights,1,1
      | ^^^^^^^^ write letters, digits, ".", "_" and "-", as in Kafka
{file}:5:1: some entries name a group and others do not
    5 | g,flights,2,2
      | ^^^^^^^^^^^^^ name it in all entries or in none
{file}:6:1: has 1 value
    6 | {{"topic": 1}}
      | ^^^^^^^^^^^^ write topic,partition,offset, or group,topic,partition,offset
6 problems; no offset of the file was used"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "1:1: the file has no offsets"),
        ("topic,partition,offset\n", "the file has no offsets"),
        (f"flights,0,{BIGINT + 1}\n", "the offset is"),
        ("flights,٣,1\n", 'the partition is "٣"'),
        (",0,1\n", 'the topic is ""'),
        ('flights,0,1\n"flights,1,1\n', "is not CSV"),
        ('[{"topic": "flights", "partition": 0, "offset": 5}]\n', "is not CSV"),
    ],
)
def test_what_is_no_file_of_offsets_is_refused_with_its_place(text, told):
    with pytest.raises(OffsetsFileInvalid) as error:
        parse_offsets(text)
    assert told in str(error.value)


def test_of_very_many_problems_the_first_are_shown():
    with pytest.raises(OffsetsFileInvalid) as told:
        parse_offsets("x\n" * 50)
    assert str(told.value).count("has 1 value") == 20
    assert "50 problems, 20 of them shown" in str(told.value)


def test_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin.csv").write_bytes(b"fl\xfcge,0,1\n")
    for name, told in (("none.csv", "No such file"), (".", "Is a directory"), ("latin.csv", "not UTF-8")):
        with pytest.raises(BadInput, match=told):
            read_text(tmp_path / name)


def test_groups_get_what_the_file_says_of_them():
    """A file without groups is for any group. One with groups must name each, with the same offset for partitions that two groups share."""
    assert offsets_for_groups({None: {P0: 5}}, ["g1", "g2"]) == {P0: 5}
    assert offsets_for_groups({"g1": {P0: 5}, "g2": {P1: 6}}, ["g1"]) == {P0: 5}
    assert offsets_for_groups({"g1": {P0: 5}, "g2": {P0: 5, P1: 6}}, ["g1", "g2"]) == {P0: 5, P1: 6}
    with pytest.raises(BadInput, match=r"has no offsets for departurs\. Did you mean departures\?"):
        offsets_for_groups({"departures": {P0: 5}}, ["departurs"])
    with pytest.raises(BadInput, match=r"two offsets for flights/0 .* Plan one group at a time"):
        offsets_for_groups({"g1": {P0: 5}, "g2": {P0: 6}}, ["g1", "g2"])


GROUPS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=8)
TOPICS = st.from_regex(r"\A[A-Za-z0-9._-]{1,30}\Z")
ROWS = st.dictionaries(st.tuples(GROUPS, TOPICS, st.integers(0, INTEGER)), st.integers(0, BIGINT), min_size=1, max_size=8)


@given(ROWS, st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC, csv.QUOTE_ALL]))
def test_any_offsets_survive_csv(rows, quoting):
    """This holds for any group names and any style of quoting."""
    text = io.StringIO()
    csv.writer(text, quoting=quoting).writerows([*key, offset] for key, offset in rows.items())
    wanted: dict[str, dict[TopicPartition, int]] = {}
    for (group, topic, partition), offset in rows.items():
        wanted.setdefault(group, {})[TopicPartition(topic, partition)] = offset
    assert parse_offsets(text.getvalue()) == wanted


@given(st.text(st.sampled_from("flights,0123\"[]{}:\n\r 'x\0"), max_size=60) | st.text(max_size=30))
def test_any_text_is_read_or_refused_and_never_anything_else(text):
    try:
        offsets = parse_offsets(text)
    except OffsetsFileInvalid:
        return
    assert all(offset >= 0 for of_group in offsets.values() for offset in of_group.values())


def test_the_work_grows_with_the_text_and_no_faster():
    """If the work grew with the square of the lines, the test would take minutes."""
    with pytest.raises(OffsetsFileInvalid) as told:
        parse_offsets("3\n" * 100_000)
    assert len(told.value.problems) == 100_000


def test_a_text_that_is_too_long_is_refused_before_it_is_read(tmp_path):
    """This holds for pasted text and for files."""
    text = "flights,0,5\n" * (MAX_BYTES // 12 + 1)
    (tmp_path / "plan.csv").write_text(text)
    for act in (lambda: parse_offsets(text), lambda: read_text(tmp_path / "plan.csv")):
        with pytest.raises(BadInput, match="more than 5,000,000 bytes"):
            act()
