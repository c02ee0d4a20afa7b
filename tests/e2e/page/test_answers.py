"""What the routes of the page answer."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from tests.e2e.page.data import REASON, topic
from tests.e2e.page.site import Site

from tidemark.db import rows, session, transaction
from tidemark.kafka.cluster import Cluster
from tidemark.rewind import beside
from tidemark.rewind.beside import KEEP
from tidemark.rewind.plan import MoveRequest
from tidemark.rewind.plan import preview as planned
from tidemark.rewind.plan_model import ToDatetime
from tidemark.rewind.plan_text import groups_as_json
from tidemark.spec import find_consumer
from tidemark.spec.scope import Scope


def test_groups_are_worst_first_and_say_why(site: Site) -> None:
    """A file with problems is listed with them. An unreachable database becomes a banner, and all other groups are shown."""
    found = site.json("api/groups")
    *worse, tolls = found["groups"]
    assert [(row["consumer"], row["health"]) for row in worse] == [
        ("bad", "bad spec"),
        ("away", "unreachable"),
        ("trips", "run failed"),
        ("fares", "blocked"),
        ("rides", "records failed"),
        ("orders", "replaying"),
    ]
    assert (tolls["consumer"], tolls["health"] in ("ok", "idle")) == ("tolls", True), "a replay beside is no incident"
    bad, away, trips, _, rides, orders = worse
    assert [each["at"] for each in bad["problems"]] == ["bad.yaml:4:11", "bad.yaml:5:1"]
    refused = 'connection to server at "127.0.0.1", port 1 failed: Connection refused'
    assert [(banner["connection"], banner["problem"]) for banner in found["banners"]] == [("elsewhere", refused)]
    assert away["why"] == f"Database elsewhere: {refused}."
    assert " failed: BadInput: " in trips["why"]
    assert (rides["waiting"], rides["failed"]) == (3, 2)
    assert (orders["owner"], orders["tags"], orders["partitions"], orders["lag"]["replay_records"]) == ("ann", ["lake", "gold"], 3, 190)


def test_group_has_rates_queries_to_try_and_the_transforms_source(site: Site) -> None:
    orders = site.json("api/groups/orders")
    assert all(part["lag"]["produced_per_s"] > 0 and part["lag"]["consumed_per_s"] is not None for part in orders["partitions"])
    assert [(one["instance"], one["map_index"], one["read"]) for one in orders["instances"]] == [
        ("consume__orders/consume/0", 0, ""),
        ("consume__orders/consume/1", 1, "shop.orders:0-2"),
    ]
    with session(site.data.url) as connection, transaction(connection) as cur:
        cur.execute(orders["queries"]["batches"])
        assert [row["batch_id"] for row in rows(cur)] == [row["batch_id"] for row in orders["batches"]] != []
    source = site.json("api/groups/orders/transform")
    assert source["text"].splitlines()[source["line"] - 1] == "def transform(record: Record) -> dict | Delete:"
    assert (source["transform"], source["file"]) == ("orders:transform", "transforms/orders.py")
    assert orders["source"] == {name: source[name] for name in ("transform", "file")}
    assert site.get("api/groups/bad/transform").status_code == 404


def test_validations_say_how_many_rows_were_deleted(site: Site) -> None:
    found = site.json("api/validations?consumer=fares")["validations"]
    assert [(row["sink_rows"], row["deleted"]) for row in found] == [(4, 1), (2, 0)]
    assert [site.json(f"api/groups/fares/validations/{row['validation_id']}")["deleted"] for row in found] == [1, 0]


def test_validations_and_rewinds_are_filtered_among_all_of_them(site: Site) -> None:
    for verdict in ("critical", "warning", "passed"):
        of_verdict = site.json(f"api/validations?verdict={verdict}")["validations"]
        assert of_verdict == [row for row in site.json("api/validations")["validations"] if row["verdict"] == verdict]
    assert [row["state"] for row in site.json("api/rewinds?consumer=orders&state=APPLIED")["rewinds"]] == ["APPLIED"]


def test_retries_say_of_each_error_whether_it_grows(site: Site) -> None:
    """A record that is not settled counts in the hour in which it first failed."""
    assert sorted((one["error_type"], one["last_hour"], one["hour_before"]) for one in site.json("api/groups/rides/retries")["growth"]) == [
        ("Fail", 2, 0),
        ("Retry", 3, 0),
    ]
    assert [(one["consumer"], one["growth"][0]["last_hour"]) for one in site.json("api/retries")["consumers"]] == [("rides", 5)]


def test_form_offers_the_consumers_own_runs_failures_and_topics_and_counts_what_matches(site: Site) -> None:
    offered = site.json("api/groups/rides/form")
    batches = {batch["batch_id"]: batch for batch in site.json("api/groups/rides")["batches"]}
    assert (offered["topics"], offered["redrive_to"], len(offered["runs"])) == ([topic("rides")], "ladder", 1)
    assert batches[offered["first_failed_batch"]]["failed"] == 2
    assert [site.json(f"api/groups/{name}/form")["redrive_to"] for name in ("orders", "away")] == ["now", "now"]

    def matching(words: str) -> int:
        return int(site.json(f"api/groups/rides/matching?{words}")["records"])

    waiting = site.json("api/groups/rides/records?state=WAITING")
    assert (waiting["total"], [record["failures"] for record in waiting["records"]]) == (3, [1, 1, 1])
    number = waiting["records"][0]["number"]
    assert [matching(f"kind={words}") for words in ("redrive", "redrive&text=carrier", f"redrive&numbers={number}")] == [2, 1, 0]
    assert [matching(f"kind={words}") for words in ("discard", "discard&state=WAITING", f"discard&numbers={number}")] == [5, 3, 1]


def test_rewind_shows_each_partition_and_who_did_what(site: Site) -> None:
    planned, applied = site.json("api/rewinds?consumer=orders")["rewinds"]
    assert [(one["state"], one["planned_by"], one["reason"]) for one in (planned, applied)] == [
        ("PLANNED", "ann", REASON),
        ("APPLIED", "ann", REASON),
    ]
    one = site.json(f"api/groups/orders/rewinds/{applied['rewind_id']}")
    assert [(part["partition"], part["old"], part["new"]) for part in one["groups"][0]["partitions"]] == [(0, 80, 5), (1, 120, 5)]
    assert (one["decided_by"], one["applied_by"]) == ("bob", "ann")
    sums = ("replay", "skip", "sink_rows", "failed_records", "rows_back", "failed_back")
    assert {name: applied[name] for name in sums} == {name: one[name] for name in sums}
    assert (applied["replay"], applied["partitions"]) == (190, 2)
    assert site.get(f"api/groups/rides/rewinds/{applied['rewind_id']}").status_code == 404


def test_replay_beside_says_how_far_it_is_what_it_found_and_why_no_second_one_can_begin(site: Site) -> None:
    """On the group's screen and in the view of the rewind. Its batches are not among those of the group."""
    (listed,) = site.json("api/rewinds?consumer=tolls")["rewinds"]
    shown = site.json(f"api/groups/tolls/rewinds/{listed['rewind_id']}")["replay_beside"]
    assert (shown["started_by"], shown["run_id"], shown["held_until"]) == ("ann", None, None)
    assert datetime.fromisoformat(shown["kept_until"]) - datetime.fromisoformat(shown["started_at"]) == KEEP
    (replay,) = shown["groups"]
    assert (replay["read"], replay["left"]) == (8, 1)
    assert [(part["partition"], part["start"], part["position"], part["end"]) for part in replay["partitions"]] == [
        (0, 0, 5, 6),
        (1, 0, 3, 3),
    ]
    assert [(each["verdict"], each["sink_rows"], each["failing"]) for each in replay["validations"]] == [("passed", 7, [])]
    assert [(error["error_type"], error["records"], error["example"]) for error in replay["errors"]] == [("Fail", 1, "no such class")]

    group = site.json("api/groups/tolls")
    assert group["replay_beside"]["groups"] == [replay | {"partitions": []}]
    assert len(group["batches"]) == 3, "two runs of the group, of which the first read two partitions"
    assert [attempt["of_rewind"] for attempt in group["attempts"]] == [None, listed["rewind_id"], None]
    assert site.json("api/groups/orders")["replay_beside"] is None
    assert site.json("api/groups/orders/form")["not_beside"] is None
    assert f"Rewind {listed['rewind_id']} is read beside already." in site.json("api/groups/tolls/form")["not_beside"]


def test_group_that_a_swap_holds_is_no_incident(site: Site) -> None:
    (listed,) = site.json("api/rewinds?consumer=tolls")["rewinds"]
    before = site.json("api/groups/tolls")["summary"]
    with session(site.data.url) as connection:
        beside.hold(connection, listed["rewind_id"], beside.HOLD)
        try:
            held = site.json("api/groups/tolls")
            assert held["replay_beside"]["held_until"] is not None
            assert [held["summary"][name] for name in ("health", "why", "fix")] == [before[name] for name in ("health", "why", "fix")]
        finally:
            beside.hold(connection, listed["rewind_id"], None)


def test_audit_log_as_csv(site: Site) -> None:
    """Newest first, as on the page."""
    lines = list(csv.DictReader(io.StringIO(site.get("api/audit.csv?kind=REWIND&consumer=orders").text)))
    assert [(line["kind"], line["consumer"], line["claimed_by"]) for line in lines] == [
        ("REWIND PLANNED", "orders", "ann"),
        ("REWIND APPLIED", "orders", "ann"),
        ("REWIND PLANNED", "orders", "ann"),
    ]
    assert [each["kind"] for each in site.json("api/audit?kind=REWIND&person=nobody")["events"]] == []


def test_preview_has_the_numbers_that_the_plan_gets(site: Site) -> None:
    """The planner computes the preview from Kafka's current logs. Nothing is stored."""
    stored = site.json("api/rewinds")
    with session(site.data.url) as connection:
        spec = find_consumer("orders", site.data.folder / "consumers")
        cluster = Cluster({"bootstrap.servers": site.data.topics.servers})
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        asked = {"scenario": "to-datetime", "value": "2026-01-01T00:00:00Z", "scope": f"{topic('orders')}:2"}
        made = site.json(f"api/groups/orders/rewind-preview?{urlencode(asked)}", "uma")
        groups = planned(connection, lambda _: cluster, MoveRequest([spec], Scope.parse([asked["scope"]]), ToDatetime(moment)))
    assert {name: made[name] for name in ("groups", "replay", "sink_rows")} == {
        name: value for name, value in groups_as_json(groups).items() if name in ("groups", "replay", "sink_rows")
    }
    assert (made["replay"], made["sink_rows"], made["problems"], made["unknown"]) == (160, 160, [], None)
    assert site.json("api/rewinds") == stored


def test_preview_says_why_a_plan_would_be_refused_and_what_it_cannot_say(site: Site) -> None:
    def asked(consumer: str, user: str = "adam", **values: str) -> Any:
        return site.json(f"api/groups/{consumer}/rewind-preview?{urlencode(values)}", user)

    far = asked("orders", scenario="to-offset", value="5000")
    assert ["is after the end of the log" in problem for problem in far["problems"]] == [True] * 3
    assert "is not a time" in asked("orders", scenario="to-datetime", value="noon")["problems"][0]
    for name in ("from-file", " From-File\n"):
        assert "the contents of the file are missing" in asked("orders", scenario=name, value="/etc/passwd")["problems"][0]
    assert "there is no rewind 999" in asked("orders", scenario="undo", value="999")["problems"][0]
    assert "does not move rides" in asked("rides", scenario="undo", value="1")["problems"][0]
    ahead = asked("orders", scenario="to-latest", beside="true")
    assert ["the target is ahead of the group. --beside" in problem for problem in ahead["problems"]] == [True]
    assert asked("orders", scenario="to-latest")["problems"] == []
    assert "An undo puts rows back at once" in asked("orders", scenario="undo", value="1", beside="true")["problems"][0]
    assert "that is neither swapped nor discarded" in asked("tolls", scenario="to-earliest", beside="true")["problems"][0]
    assert asked("tolls", scenario="to-earliest")["problems"] == []
    away = asked("away", scenario="to-earliest")
    assert (away["problems"], away["groups"], "refused" in away["unknown"]) == ([], [], True)
