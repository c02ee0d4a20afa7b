"""How operators inspect, discard and edit failed records. Every action is stored with who, when, why and how many."""

from __future__ import annotations

import base64
import json
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.integration.retry.outbox import Outbox
from tests.support.ledger import in_thread
from tests.support.shell import tidemark
from tests.support.waiting import until

from tidemark.errors import BadInput
from tidemark.retry import admin
from tidemark.retry.admin import NotEditable, Payload, SelectionChanged
from tidemark.retry.filter import Filter, RecordState
from tidemark.retry.redrive_text import selection_lines

WHY = {"reason": "the service is gone for good", "by": "ann@host"}
REASON = ("--reason", "the service is gone for good")


def command(outbox: Outbox, *words: str) -> subprocess.CompletedProcess[str]:
    verb, *rest = words
    return tidemark(outbox.consumer, "retries", verb, outbox.name, *rest)


def as_json(outbox: Outbox, *words: str) -> Any:
    done = command(outbox, *words, "--output", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def numbers(outbox: Outbox, **wanted: Any) -> list[int]:
    with outbox.session() as connection:
        return [one.number for one in admin.list_records(connection, outbox.group, Filter(**wanted), limit=100)]


def test_a_filter_finds_what_it_says_and_nothing_else(outbox: Outbox) -> None:
    """State, error, origin, key, time, tier, refusal, and several of them combined. Texts are matched literally, not as patterns."""
    one = outbox.add(b"1", key=b"\x00\xff", partition=0, error=("KeyError", "100% wrong_city"))
    two = outbox.add(b"2", key=b"", partition=1, error=("KeyError", "100 is Wrong City"), number=3)
    three = outbox.add(b"3", partition=2, error=("ValueError", "wrong"), failed=True)
    outbox.sql("UPDATE tidemark.failed_record SET created_at = '2026-03-24 12:00Z' WHERE failed_record_id = %(id)s", id=two)
    outbox.sql("UPDATE tidemark.failed_record SET publish_error = 'too large' WHERE failed_record_id = %(id)s", id=three)
    noon = datetime(2026, 3, 24, 12, tzinfo=UTC)
    states = (RecordState.WAITING, RecordState.FAILED)
    for wanted, expected in (
        ({}, [one, two, three]),
        ({"numbers": (one, three, 999)}, [one, three]),
        ({"states": states[:1]}, [one, two]),
        ({"states": states}, [one, two, three]),
        ({"error_type": "KeyError"}, [one, two]),
        ({"error_text": "wrong"}, [one, two, three]),
        ({"error_text": "100%"}, [one]),
        ({"error_text": "wrong_c"}, [one]),
        ({"topic": outbox.topic}, [one, two, three]),
        ({"topic": "other"}, []),
        ({"partition": 0}, [one]),
        ({"from_offset": 0, "to_offset": 1}, [one]),
        ({"key": b"\x00\xff"}, [one]),
        ({"key": b""}, [two]),
        ({"until": noon + timedelta(seconds=1)}, [two]),
        ({"since": noon + timedelta(seconds=1)}, [one, three]),
        ({"tier": "1h"}, [two]),
        ({"tier": "failed"}, [three]),
        ({"refused": True}, [three]),
        ({"error_type": "KeyError", "partition": 1, "tier": "1h"}, [two]),
    ):
        assert numbers(outbox, **wanted) == expected, wanted  # type: ignore[arg-type]


def test_a_list_fits_a_terminal_and_goes_on_where_it_ended(outbox: Outbox) -> None:
    """Lines have at most 80 columns, however long the names and texts. Terminal control sequences are not passed through."""
    made = [outbox.add(error=("KeyError", "no such city\n\x1b[31m" + "x" * 300)) for _ in range(3)]
    lines = outbox.in_terminal("retries", "list", outbox.name, "--limit", "2")
    assert max(map(len, lines)) <= 80
    assert "[31m" in lines[2]
    assert not any("\x1b[31m" in line for line in lines)
    assert [line.split()[0] for line in lines if line.split()[0].isdigit()] == [str(number) for number in made[:2]]
    assert command(outbox, "list", "--limit", "2").stderr == f"there may be more: --after {made[1]}\n"
    assert [one["number"] for one in as_json(outbox, "list", "--after", str(made[1]))] == made[2:]


def test_counts_are_by_state_and_error(outbox: Outbox) -> None:
    """The most frequent come first. Each line shows the newest text, marked as an example if there are several."""
    for number in range(5):
        outbox.add(error=("TimeoutError", f"try {number}"))
    outbox.add(error=("TimeoutError", "over"), failed=True)
    outbox.add(error=("KeyError", "x"), failed=True)
    told = as_json(outbox, "count")["counts"]
    assert [(one["state"], one["error_type"], one["records"], one["example"]) for one in told] == [
        ("WAITING", "TimeoutError", 5, "try 4"),
        ("FAILED", "KeyError", 1, "x"),
        ("FAILED", "TimeoutError", 1, "over"),
    ]
    assert [one["records"] for one in as_json(outbox, "count", "--state", "FAILED", "--error", "KeyError")["counts"]] == [1]
    lines = outbox.in_terminal("retries", "count", outbox.name)
    assert max(map(len, lines)) <= 80
    assert [line.rstrip().split("  ")[-1].strip() for line in lines if "Error: " in line] == [
        "TimeoutError: 5 different texts, such as: try 4",
        "KeyError: x",
        "TimeoutError: over",
    ]


def test_one_record_is_shown_with_its_whole_story(outbox: Outbox) -> None:
    """Payload as text or in hex, headers, every try, state and place."""
    outbox.make_topics()
    number = outbox.add("né Zürich".encode(), key=b"\x00\xff", headers=[("trace", b"abc"), ("none", None)], failed=True)
    tries = [{"number": 0, "type": "TimeoutError", "text": "down", "attempt_id": 1, "at": "2026-03-24T13:00:00.5+00:00"}]
    outbox.sql("UPDATE tidemark.failed_record SET story = %(story)s, retry_number = 1", story=json.dumps(tries))
    outbox.relay()
    shown = " ".join(command(outbox, "show", str(number)).stdout.split())
    for words in (
        f"record {outbox.topic}/0@0, 2026-03-24 13:00:00 UTC",
        f"state FAILED, retry 1, {outbox.group}.failed/0@0",
        "key 2 bytes, not valid UTF-8 (--as hex)",
        "value né Zürich",
        "header trace abc",
        "header none null",
        "try 0 2026-03-24T13:00:00 TimeoutError: down",
        "try 1 KeyError: no such city",
    ):
        assert words in shown
    assert "key 00 ff" in " ".join(command(outbox, "show", str(number), "--as", "hex").stdout.split())
    told = as_json(outbox, "show", str(number))
    assert (base64.b64decode(told["value"]).decode(), told["tries"], told["retry_offset"]) == ("né Zürich", tries, 0)
    refused = command(outbox, "show", "999")
    assert refused.returncode == 1
    assert f"group {outbox.group} has no failed record 999" in refused.stderr


def test_discarded_records_are_settled_and_the_action_is_kept(outbox: Outbox) -> None:
    """Scenario 33: the first record of a topic and one in the middle, waiting or failed, published or not. A loaded one stays loaded."""
    outbox.make_topics()
    waiting = [outbox.add(f"{number}".encode()) for number in range(3)]
    failed, loaded = outbox.add(failed=True), outbox.add()
    outbox.relay()
    outbox.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL WHERE failed_record_id = %(id)s", id=loaded)
    late = outbox.add(b"not published")
    with outbox.session() as connection:
        asked = Filter(numbers=(waiting[0], waiting[1], failed, loaded, late))
        assert admin.discard(connection, outbox.group, asked, **WHY) == 4
        assert admin.discard(connection, outbox.group, asked, **WHY) == 0
    states = [outbox.record(number)["state"] for number in (*waiting, failed, loaded, late)]
    assert states == ["DISCARDED", "DISCARDED", "WAITING", "DISCARDED", "LOADED", "DISCARDED"]
    assert outbox.relay().records == 0
    kept = outbox.sql("SELECT kind, filter, reason, done_by, records FROM tidemark.retry_action ORDER BY action_id")
    assert kept == [("DISCARD", {"numbers": list(asked.numbers)}, WHY["reason"], WHY["by"], records) for records in (4, 0)]
    assert outbox.record(failed)["action_id"] == 1
    assert "discarded" in command(outbox, "show", str(failed)).stdout


def test_approved_discard_settles_what_was_shown_or_nothing(outbox: Outbox) -> None:
    """The plan counts only records that would be settled. If another record has matched since, nothing is discarded. A second call, as
    after a COMMIT whose answer was lost, discards no more and returns the same."""
    kept = outbox.add(b"kept", error=("ValueError", "another"))
    first, second, loaded = outbox.add(b"1"), outbox.add(b"2", failed=True), outbox.add(b"3")
    outbox.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL WHERE failed_record_id = %(id)s", id=loaded)
    asked = Filter(error_type="KeyError")
    with outbox.session() as connection:
        seen = admin.select_to_discard(connection, outbox.group, asked)
        assert (seen.records, [one.number for one in seen.examples], sum(one.records for one in seen.counts)) == (2, [first, second], 2)
        said = "\n".join(selection_lines(outbox.name, asked, WHY["reason"], seen))
        assert f"{second}: {outbox.topic}/" in said
        late = outbox.add(b"late")
        with pytest.raises(SelectionChanged, match="Nothing was discarded"):
            admin.discard(connection, outbox.group, asked, **WHY, only=seen.digest)
        assert [outbox.record(number)["state"] for number in (first, second, late)] == ["WAITING", "FAILED", "WAITING"]
        assert outbox.sql("SELECT * FROM tidemark.retry_action") == []
        again = admin.select_to_discard(connection, outbox.group, asked)
        assert admin.discard(connection, outbox.group, asked, **WHY, only=again.digest) == 3
        newest = outbox.add(b"newest")
        assert admin.discard(connection, outbox.group, asked, **WHY, only=again.digest) == 3
        assert [action["records"] for action in admin.actions(connection, outbox.group, limit=10)] == [3]
        with pytest.raises(SelectionChanged):
            admin.discard(connection, outbox.group, asked, reason=WHY["reason"], by="bob@host", only=again.digest)
        for wanted in (Filter(), Filter(states=(RecordState.LOADED,)), Filter(numbers=(999,))):
            with pytest.raises(BadInput):
                admin.select_to_discard(connection, outbox.group, wanted)
    assert [outbox.record(number)["state"] for number in (kept, newest)] == ["WAITING", "WAITING"]


def test_discarding_needs_a_reason_and_a_filter_and_changes_nothing_without(outbox: Outbox) -> None:
    number = outbox.add()
    with outbox.session() as connection:
        for wanted, why in ((Filter(), WHY), (Filter(numbers=(number, 999)), WHY), (Filter(numbers=(number,)), {**WHY, "reason": "no"})):
            with pytest.raises(BadInput):
                admin.discard(connection, outbox.group, wanted, **why)
        with pytest.raises(BadInput, match="no group 'other'"):
            admin.discard(connection, "other", Filter(numbers=(number,)), **WHY)
    assert outbox.record(number)["state"] == "WAITING"
    assert outbox.sql("SELECT * FROM tidemark.retry_action") == []
    assert command(outbox, "discard", *REASON).returncode == 1
    assert command(outbox, "discard", "--number", str(number)).returncode == 2
    done = command(outbox, "discard", "--error", "KeyError", *REASON)
    assert (done.returncode, done.stdout) == (0, "1 discarded\n")
    ((by, wanted),) = outbox.sql("SELECT done_by, filter FROM tidemark.retry_action")
    assert "@" in by
    assert wanted == {"error_type": "KeyError"}
    assert "error type KeyError: the service is gone for good" in command(outbox, "actions").stdout


def test_a_record_that_is_discarded_while_it_is_published_ends_as_discarded(outbox: Outbox) -> None:
    """The discard waits for the transaction that has locked the record."""
    outbox.make_topics()
    number = outbox.add()
    with outbox.session() as relay:
        with relay.cursor() as cur:
            cur.execute("SELECT 1 FROM tidemark.failed_record WHERE failed_record_id = %s FOR UPDATE", (number,))
        with (
            outbox.session() as operator,
            in_thread(lambda: admin.discard(operator, outbox.group, Filter(numbers=(number,)), **WHY)) as done,
        ):
            until(lambda: outbox.sql("SELECT 1 FROM pg_locks WHERE NOT granted"))
            relay.rollback()
            assert done.result(180) == 1
    assert outbox.record(number)["state"] == "DISCARDED"


def test_an_edit_keeps_what_was_and_links_both_ways(outbox: Outbox) -> None:
    """Scenario 39: two edits of key, value and headers. The record has the newest payload, each edit the one before it."""
    outbox.make_topics()
    number = outbox.add(b"bad", key=b"key", headers=[("a", b"1")], failed=True)
    outbox.relay()
    with outbox.session() as connection:
        first = admin.edit(connection, outbox.group, [(number, lambda was: Payload(was.key, b"better", was.headers))], **WHY)[number]
        second = admin.edit(connection, outbox.group, [(number, lambda _: Payload(None, None, [("b", None)]))], **WHY)[number]
        same = admin.edit(connection, outbox.group, [(number, lambda was: was)], **WHY)[number]
        found = admin.show_record(connection, outbox.group, number)
    assert same is None
    assert found.payload == Payload(None, None, (("b", None),))
    assert [(one.action_id, one.by, one.was) for one in found.edits] == [
        (first, "ann@host", Payload(b"key", b"bad", (("a", b"1"),))),
        (second, "ann@host", Payload(b"key", b"better", (("a", b"1"),))),
    ]
    row = outbox.record(number)
    assert (row["state"], row["action_id"], row["key"], row["value"]) == ("FAILED", second, None, None)
    shown = as_json(outbox, "show", str(number), "--original")
    assert base64.b64decode(shown["value"]) == b"bad"


def test_only_what_has_failed_can_be_edited(outbox: Outbox) -> None:
    """A waiting record may already be in a topic unchanged. One that the broker rejected is in none, and can be edited to fit."""
    outbox.make_topics(largest=10_000)
    waiting, large = outbox.add(b"x"), outbox.add(bytes(range(256)) * 4_000)
    loaded = outbox.add()
    outbox.sql("UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL WHERE failed_record_id = %(id)s", id=loaded)
    outbox.sql("UPDATE tidemark.failed_record SET publish_error = 'MSG_SIZE_TOO_LARGE' WHERE failed_record_id = %(id)s", id=large)
    with outbox.session() as connection:
        for number in (waiting, loaded):
            with pytest.raises(NotEditable, match="Nothing was changed"):
                admin.edit(connection, outbox.group, [(number, lambda was: Payload(was.key, b"new", was.headers))], **WHY)
        assert admin.edit(connection, outbox.group, [(large, lambda was: Payload(was.key, b"small", was.headers))], **WHY)[large]
    assert outbox.relay().records == 2
    assert sorted(outbox.hops()) == [waiting, large]
    outbox.check_published()


def test_an_export_is_read_again_by_edit(outbox: Outbox) -> None:
    """An export has one record per line, with bytes in base64. Lines that were not modified change nothing."""
    made = [outbox.add(bytes([number, 255]), key=None, headers=[("h", b"\x80")], failed=True) for number in range(3)]
    lines = command(outbox, "export", "--state", "FAILED").stdout.splitlines()
    told = [json.loads(line) for line in lines]
    assert [one["number"] for one in told] == made
    told[1] |= {"value": base64.b64encode(b"repaired").decode(), "headers": [["a", "Yj1j"]]}
    file = outbox.consumer.folder / "records.jsonl"
    file.write_text("\n".join(json.dumps(one) for one in told))
    done = command(outbox, "edit", "--from", str(file), *REASON)
    assert (done.returncode, done.stdout) == (0, "1 edited, 2 unchanged\n"), done.stderr
    assert [outbox.record(number)["value"] for number in made] == [b"\x00\xff", b"repaired", b"\x02\xff"]
    assert [outbox.record(number)["headers"] for number in made[:2]] == [[["h", "gA=="]], [["a", "Yj1j"]]]
    file.write_text('{"number": 1}\n')
    assert "not a line of an export" in command(outbox, "edit", "--from", str(file), *REASON).stderr


def test_records_of_a_file_are_edited_all_or_none(outbox: Outbox) -> None:
    """The error says that nothing was changed. The same holds for a number that the group does not have."""
    failed, waiting = outbox.add(b"bad", failed=True), outbox.add(b"x")

    def new(was: Payload) -> Payload:
        return Payload(was.key, b"new", was.headers)

    with outbox.session() as connection:
        with pytest.raises(NotEditable, match="Nothing was changed"):
            admin.edit(connection, outbox.group, [(failed, new), (waiting, new)], **WHY)
        with pytest.raises(BadInput, match="no failed record"):
            admin.edit(connection, outbox.group, [(failed, new), (10**30, new)], **WHY)
        assert admin.actions(connection, outbox.group, limit=10) == []
        assert admin.show_record(connection, outbox.group, failed).payload.value == b"bad"


def test_an_export_is_complete_whatever_its_size(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "AT_A_TIME", 7)
    outbox.add_many(21, failed=True)
    with outbox.session() as connection:
        found = list(admin.export_records(connection, outbox.group, Filter()))
    assert [one["offset"] for one in found] == list(range(21))


def test_a_record_is_edited_from_the_command_line(outbox: Outbox) -> None:
    """Text, a file byte for byte, a tombstone. Wrong usage is rejected."""
    number = str(outbox.add(b"bad", key=b"key", failed=True))
    file = outbox.consumer.folder / "value.bin"
    file.write_bytes(b"\x00\xff\n")
    assert command(outbox, "edit", number, "--value-file", str(file), *REASON).stdout == "1 edited, 0 unchanged\n"
    row = outbox.record(int(number))
    assert (row["key"], row["value"]) == (b"key", b"\x00\xff\n")
    assert command(outbox, "edit", number, "--null-value", "--key", "new", *REASON).returncode == 0
    assert (outbox.record(int(number))["key"], outbox.record(int(number))["value"]) == (b"new", None)
    for words in ((number,), (), (number, "--value", "x", "--null-value"), (number, "--from", str(file))):
        assert command(outbox, "edit", *words, *REASON).returncode == 2
    refused = command(outbox, "edit", number, "--value", "x", "--reason", "no")
    assert (refused.returncode, "Say why" in refused.stderr) == (1, True)


def test_relay_from_the_command_line_says_what_it_did_and_fails_where_a_topic_is_missing(outbox: Outbox) -> None:
    """Exit status 1 and a message that says what to do. Everything else is published."""
    first, missing, now, last = outbox.tiers
    outbox.consumer.set(retry={**outbox.consumer.keys["retry"], "topics": {"create": False}})
    outbox.make_topics(without=[missing])
    outbox.add()
    outbox.add(number=3)
    done = command(outbox, "relay")
    assert (done.returncode, done.stdout) == (1, f"{first}: 1 published\n")
    assert f"Cannot publish to {missing}: it does not exist. See: tidemark retries topics {outbox.name}" in " ".join(done.stderr.split())
    outbox.make_topic(missing)
    assert as_json(outbox, "relay")["published"] == {missing: 1}
    assert command(outbox, "relay").stdout == f"{outbox.group}: nothing to publish\n"
    assert now != last
