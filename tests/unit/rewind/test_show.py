"""A plan as a table, as JSON, and as Markdown."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tidemark.records.ranges import TopicPartition
from tidemark.rewind.plan_model import GroupPlan, PartitionPlan, Plan, RewindState, ToDatetime, Undo
from tidemark.rewind.plan_text import MARKDOWN_ROWS, NOTED, as_json, markdown, table
from tidemark.text.wording import about, escaped

NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)
EVIL = 'a | b\n# <b onclick="x">[red]c[/red]</b> ![p](http://x) `y` **z** \x1b[31m &lt; \\'


def part(number: int, old: int, new: int, rows: int = 0, failed: int = 0, *, topic: str = "flights", lost: tuple[int, int] | None = None):
    target = new if lost is None else lost[0]
    return PartitionPlan(TopicPartition(topic, number), 1, "uuid", old, target, new, min(old, target), False, rows, failed)


GROUP = GroupPlan(
    "departures",
    "departures-group",
    1,
    ("analytics.departures",),
    (part(0, 2_500, 1_000, 1_500, 2), part(1, 900, 1_000), part(2, 40, 40), part(0, 700, 650, 45, 0, topic="weather", lost=(600, 650))),
    1234,
    10.0,
    "Stable",
    2,
    ("analytics.departures",),
    {},
)
PLAN = Plan(7, RewindState.PLANNED, ToDatetime(NOON), "a bug of Tuesday", "ann", NOON, NOON + timedelta(hours=4), False, "digest", (GROUP,))


def printed(plan: Plan, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table(plan))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_says_what_where_from_and_where_to():
    """There is a table for each topic, with totals, losses, the lag, and what was announced. An approver reads the same in Markdown."""
    assert [line.rstrip() for line in printed(PLAN).splitlines()] == TABLE.splitlines()
    page = markdown(PLAN)
    assert {
        "| flights | 0 | 2,500 | 1,000 | 1,500 | 0 | 1,500 | 2 |",
        "Reason: a bug of Tuesday  ",
        "- lag afterwards: 1,234 offsets; about 2 min at 10 records/s",
    } <= set(page.splitlines())
    assert "At least 1,550 offsets read again" in page


TABLE = """\
Rewind 7 (PLANNED): Continue at the first record at or after
2026-03-29T12:00:00Z.
Reason: a bug of Tuesday
Planned by ann at 2026-03-29T12:00:00Z; can be applied until
2026-03-29T16:00:00Z.

departures (group departures-group, Stable, 2 attempts in flight), table
analytics.departures
topic flights
part    now    new   moves   rows  failed
─────────────────────────────────────────
   0  2,500  1,000  -1,500  1,500       2
   1    900  1,000    +100      0       0
   2     40     40      +0      0       0
topic weather
part  now  new  moves  rows  failed
───────────────────────────────────
   0  700  650    -50    45       0
weather/0: offsets 600 to 649 are gone from the log; they will be stored as lost
lag afterwards: 1,234 offsets; about 2 min at 10 records/s
asset events for analytics.departures already announced rows that are taken out

At least 1,550 offsets read again, 100 skipped permanently; 1,545 rows and 2
failed records taken out and kept for an undo."""


@pytest.mark.parametrize("great", [10**9, 10**12 - 1, 10**12, 10**15 - 1, 10**15, 2**63 - 1])
def test_table_fits_a_terminal_whatever_the_offsets_and_names(great):
    """The table has at most 80 columns, no number is cut off, and a topic's name of the maximum length is wrapped, not truncated."""
    topic = "t" * 249
    partitions = (part(99_999, great, 0, 10**8, 10**4, topic=topic), part(100_000, 0, great, topic=topic))
    text = printed(replace(PLAN, groups=(replace(GROUP, partitions=partitions),)))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert {f"{great:,}", str(great)} & set(text.split())
    assert topic in text.replace("\n", "").replace(" ", "")


def test_plan_that_was_applied_no_longer_guesses():
    """It shows no "at least", no lag, and no expiry."""
    done = replace(
        PLAN, state=RewindState.APPLIED, decided_by="bob", decided_at=NOON, applied_by="cron", applied_at=NOON + timedelta(hours=1)
    )
    text = printed(done)
    assert "Rewind 7 (APPLIED)" in text
    assert "Approved by bob at 2026-03-29T12:00:00Z.\nApplied by cron at 2026-03-29T13:00:00Z." in re.sub(" +\n", "\n", text)
    assert "Rejected by bob" in printed(replace(PLAN, state=RewindState.REJECTED, decided_by="bob", decided_at=NOON))
    assert not re.search(r"At least|lag afterwards|applied until", text)


def test_what_is_not_known_is_said():
    slow = markdown(replace(PLAN, groups=(replace(GROUP, lag=3, records_per_s=0.27),)))
    assert "- lag afterwards: 3 offsets; about 11 s at 0.3 records/s" in slow.splitlines(), "a slow group is not one that reads nothing"
    group = replace(GROUP, records_per_s=None, in_flight=0, announced_assets=(), partitions=())
    text = " ".join(printed(replace(PLAN, groups=(group,), allow_loss=True)).split())
    for words in ("how long that takes is unknown", "nobody is reading", "no partition moves", "given up and stored as lost"):
        assert words in text
    assert "nothing left to read afterwards" in printed(replace(PLAN, groups=(replace(group, lag=0),)))


def test_json_has_everything():
    told = json.loads(json.dumps(as_json(PLAN)))
    assert (told["rewind_id"], told["state"]) == (7, "PLANNED")
    assert told["scenario"] == {"scenario": "to-datetime", "moment": "2026-03-29T12:00:00Z"}
    assert (told["replay"], told["skip"], told["sink_rows"], told["failed_records"]) == (1550, 100, 1545, 2)
    group = told["groups"][0]
    assert (group["lag_records"], group["catch_up_s"], group["announced_assets"]) == (1234, 123.4, ["analytics.departures"])
    moved = {"topic": "weather", "partition": 0, "old": 700, "new": 650, "replay": 50, "skip": 0}
    stored = {"sink_rows": 45, "failed_records": 0, "superseded_from": 600, "lost": [600, 650]}
    assert group["partitions"][3] == {**moved, **stored, "backfill_left": None, "rows_back": 0, "failed_back": 0}


def test_an_undo_says_what_comes_back_and_what_goes():
    """The approver sees this in the text and for each partition."""
    group = replace(GROUP, partitions=(replace(part(0, 1_000, 251_000, 1_200, 3), rows_back=238_750, failed_back=6_250),))
    undo = replace(PLAN, scenario=Undo(5), undo_of=5, groups=(group,))
    text = markdown(undo)
    assert (
        "238,750 rows and 6,250 failed records of rewind 5 come back; at least 1,200 rows and 3 failed records taken out and kept "
        "in case the undo is undone; 0 offsets read again."
    ) in text
    assert "| flights | 0 | 1,000 | 251,000 | 0 | 250,000 | 1,200 | 3 | 238,750 | 6,250 |" in text.splitlines()
    assert "| rows back | failed back |" in text
    narrow = [line.split() for line in printed(undo).splitlines() if line.split()[:1] == ["0"]]
    assert narrow == [["0", "1,000", "251,000", "+250,000", "1,200", "3", "238,750", "6,250"]]
    assert "238,750 rows and 6,250 failed records of rewind 5 come back" in " ".join(printed(undo).split())
    assert (as_json(undo)["rows_back"], as_json(undo)["failed_back"]) == (238_750, 6_250)


def test_a_plan_says_what_becomes_of_what_it_skips() -> None:
    """Records are skipped permanently, or until the backfill. An undo shows none as skipped. An applied plan says how much is left."""

    def plan(move: PartitionPlan, **changes: object) -> Plan:
        return replace(PLAN, groups=(replace(GROUP, partitions=(move,)),), **changes)  # type: ignore[arg-type]

    skips = part(0, 30, 70)
    assert "40 skipped permanently;" in markdown(plan(skips))
    assert "40 skipped, to be read by the backfill;" in markdown(plan(skips, backfill=True))
    assert "40 skipped" not in markdown(plan(skips, scenario=Undo(3), undo_of=3))
    assert "0 skipped;" in markdown(plan(part(0, 70, 30), backfill=True))
    half = plan(replace(skips, backfill_left=25), backfill=True, state=RewindState.APPLIED)
    assert "backfill: 25 offsets still to read; tidemark backfill departures 7 reads them" in markdown(half)
    assert (as_json(half)["backfill"], as_json(half)["groups"][0]["partitions"][0]["backfill_left"]) == (True, 25)
    done = plan(replace(skips, backfill_left=0), backfill=True, state=RewindState.APPLIED)
    assert "backfill: nothing left to read" in markdown(done)


def test_markdown_of_a_very_large_plan_is_cut_and_summed():
    partitions = tuple(part(number, 10, 2, 3, 1, lost=(0, 2)) for number in range(MARKDOWN_ROWS + 5))
    text = markdown(replace(PLAN, groups=(replace(GROUP, partitions=partitions),)))
    assert text.count("offsets 0 to 1 are gone from the log") == NOTED
    assert f"offsets of {MARKDOWN_ROWS + 5 - NOTED} more partitions are gone" in text
    assert "| 5 more |  |  |  | 40 | 0 | 15 | 5 |" in text
    assert text.count("| flights |") == MARKDOWN_ROWS


def test_what_users_write_has_no_effect_in_any_form():
    """Markdown, HTML, rich's markup and terminal control characters have no effect, but the words are all shown."""
    plan = replace(PLAN, reason=EVIL, planned_by="[link=http://x]eve[/link]")
    shown = printed(plan, 200)
    assert "[red]c[/red]" in shown
    assert "\x1b" not in shown
    text = markdown(plan)
    line = next(line for line in text.splitlines() if line.startswith("Reason"))
    assert not re.search(r"(?<!\\)[<>\[\]`*|#&]", line)
    assert len([line for line in text.splitlines() if line.startswith("#")]) == 0
    assert as_json(plan)["reason"] == EVIL


@given(st.text())
def test_escaped_text_has_no_mark_left_and_reads_the_same(text):
    """Each special character has a backslash. Without the backslashes, the result is the text on one line."""
    done = escaped(text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_{}\[\]<>#|~&]", done)
    plain = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    assert re.sub(r"\\(.)", r"\1", done) == plain


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.2, "1 s"), (20, "20 s"), (45, "a minute"), (61, "1 min"), (7100, "118 min"), (9000, "2.5 h"), (260_000, "3.0 days")],
)
def test_length_of_time_is_told_as_a_person_says_it(seconds, told):
    assert about(seconds) == told
