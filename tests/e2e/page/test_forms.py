"""The form for a rewind, and the run that it requests, in a real Chromium."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from datetime import datetime
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from tests.e2e.page.data import topic
from tests.e2e.page.site import Site
from tests.e2e.page.visitor import Visit, views
from tests.support.scenario import tidy_imports

from tidemark.db import session
from tidemark.rewind import beside

pytestmark = pytest.mark.needs("chromium")


def test_a_rewind_starts_from_a_moment_a_batch_or_a_run(site: Site, visit: Visit) -> None:
    """Both a click and the keyboard open the form with the choice filled in. Users who may not rewind are not offered it."""
    visitor = visit("uma")
    page = visitor.open("groups/orders", "Effective spec")
    known = site.json("api/groups/orders")

    def form() -> tuple[str, str]:
        page.get_by_label("Scenario").wait_for()
        return page.get_by_label("Scenario").input_value(), parse_qs(urlsplit(page.url).query)["value"][0]

    chart = page.get_by_role("slider", name="Lag over time")
    box = chart.bounding_box()
    assert box is not None
    chart.click(position={"x": 60, "y": box["height"] / 2})  # left of the first sample, so that the first sample is chosen
    assert form() == ("to-datetime", f"{datetime.fromisoformat(known['history'][0]['at']):%Y-%m-%dT%H:%M:%SZ}")

    page.go_back()
    chart.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    said = chart.get_attribute("aria-valuetext")
    page.keyboard.press("Enter")
    third = f"{datetime.fromisoformat(known['history'][-3]['at']):%Y-%m-%d %H:%M:%S}"
    assert (said, form()) == (f"{third} UTC", ("to-datetime", f"{third.replace(' ', 'T')}Z"))

    page.go_back()
    page.get_by_role("link", name="Rewind to before batch").first.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert form() == ("to-batch", str(known["batches"][1]["batch_id"]))

    page.go_back()
    oldest = known["attempts"][-1]
    page.get_by_role("link", name=f"Rewind to before attempt {oldest['attempt_id']}").click()
    assert form() == ("to-batch", f"{oldest['dag_id']}/{oldest['run_id']}")
    page.get_by_role("status", name="Preview").get_by_text("leave lake.orders").first.wait_for()

    reader = visit("vic")
    page = reader.open("groups/orders", "Effective spec")
    page.get_by_role("img", name="Lag over time").wait_for()
    assert page.get_by_role("slider").count() == page.get_by_role("link", name="Rewind to before").count() == 0


def test_form_shows_what_the_choice_would_do_as_it_changes(site: Site, visit: Visit) -> None:
    visitor = visit("uma")
    page = visitor.open("groups/orders/rewind?scenario=to-offset", "Where to")
    shown = page.get_by_role("status", name="Preview")
    shown.get_by_text("Shown when the choice is complete").wait_for()
    page.locator("[name=scope]").fill(f"{topic('orders')}:2")
    page.locator("[name=value]").fill("60")
    shown.get_by_text("100 offsets read again; 100 rows leave lake.orders.").wait_for()
    assert shown.get_by_role("row").nth(1).inner_text().split("\t") == [f"{topic('orders')}/2", "160", "60", "100", "0", "100", "0"]
    assert "Downstream DAGs have already been notified" in shown.inner_text()
    page.locator("[name=value]").fill("5000")
    shown.get_by_text("The plan would be refused").wait_for()
    assert "target 5000 is after the end of the log [0, 160)" in shown.inner_text()
    page.locator("[name=reason]").fill("read everything again")
    page.get_by_text("The plan would be refused, as the preview says").wait_for()
    assert page.get_by_role("button", name="Request the rewind …").is_disabled()
    page.get_by_label("Scenario").select_option("to-latest")
    shown.get_by_text("0 offsets read again").wait_for()

    visitor.cut_off("**/rewind-preview?*")
    page.get_by_label("Scenario").select_option("to-earliest")
    shown.get_by_text("You can still request the rewind").wait_for()
    assert page.get_by_role("button", name="Request the rewind …").is_enabled()


def test_undo_says_what_comes_back_and_what_goes(site: Site, visit: Visit) -> None:
    visitor = visit("uma")
    page = visitor.open(views(site)["rewind"][0], "Read again")
    page.get_by_role("link", name="Undo …").click()
    shown = page.get_by_role("status", name="Preview")
    shown.get_by_text("190 rows of rewind 1 come back; 0 rows leave lake.orders").wait_for()
    assert [row.split("\t")[-2:] for row in shown.get_by_role("row").all_inner_texts()] == [
        ["Rows back", "Failed back"],
        ["75", "0"],
        ["115", "0"],
    ]


def test_times_are_in_the_zone_that_the_user_has_chosen_in_airflow(site: Site, visit: Visit) -> None:
    """The field for a time, the presets and the preview, too. A new choice redraws the page."""
    visitor = visit("uma")
    page = visitor.open("groups/orders/rewind?scenario=to-datetime&value=2026-01-02T10:00:00Z", "Where to")
    try:
        page.evaluate("localStorage.setItem('timezone', JSON.stringify('Asia/Tokyo'))")
        page.get_by_text("In Asia/Tokyo, the time zone chosen in Airflow. 2026-01-02 19:00:00 +09:00").wait_for()
        assert page.locator("[name=value]").input_value().startswith("2026-01-02T19:00")
        page.locator("[name=value]").fill("2026-01-03T08:30:00")
        page.get_by_role("status", name="Preview").get_by_text("at or after 2026-01-03 08:30:00 +09:00").wait_for()
        assert parse_qs(urlsplit(page.url).query)["value"] == ["2026-01-02T23:30:00Z"]
        page.locator("[name=value]").focus()
        for key in ("Tab", "Tab", *"2025"):  # past the month and the day
            page.keyboard.press(key)
        assert page.locator("[name=value]").input_value().startswith("2025-01-03T08:30")
        page.get_by_role("button", name="yesterday 00:00").click()
        assert parse_qs(urlsplit(page.url).query)["value"][0].endswith("T15:00:00Z")
        page.get_by_role("button", name="before the run of").first.click()
        assert page.get_by_label("Scenario").input_value() == "to-batch"
        page = visitor.open("groups/orders", "Effective spec")
        assert all("+09:00" in each for each in visitor.titles("aria-label^='Lag over time'", "circle"))
    finally:
        page.evaluate("localStorage.removeItem('timezone')")


def set_states(site: Site, run: str, **states: str) -> None:
    """Sets the states of a run's tasks in Airflow's database, as a scheduler would."""
    with contextlib.closing(sqlite3.connect(site.data.folder / "airflow.db", timeout=30)) as airflow, airflow:
        for task, state in states.items():
            assert airflow.execute("UPDATE task_instance SET state = ? WHERE run_id = ? AND task_id = ?", (state, run, task)).rowcount


def test_requested_run_is_followed_to_its_end(site: Site, visit: Visit) -> None:
    """From its request to the approval, and to what was not done; then it asks no more."""
    visitor = visit("uma")
    visitor.page.clock.install()
    page = visitor.open("groups/rides/rewind?scenario=to-earliest", "Where to")
    page.locator("[name=reason]").fill("read everything again")
    page.get_by_role("button", name="Request the rewind …").click()
    page.get_by_text("Rows loaded from there on are taken out of lake.rides").wait_for()
    assert not page.locator("pre").is_visible()
    run = visitor.requests(page.get_by_role("button", name="Request the rewind", exact=True).click)["dag_run_id"]
    waits = page.get_by_text("check that the DAG rewind is not paused")
    waits.wait_for()
    page.set_viewport_size({"width": 400, "height": 800})
    step, words = (each.bounding_box() for each in (page.get_by_label("Progress").get_by_role("listitem").first, waits))
    assert step is not None
    assert words is not None
    assert (words["y"], words["x"] > step["x"]) == (pytest.approx(step["y"], abs=4), True), "the words are beside their mark"

    become = functools.partial(set_states, site, run)
    become(plan="success", apply="awaiting_input")
    link = page.get_by_role("link", name="Review and approve it")
    link.wait_for()
    assert (link.get_attribute("href") or "").endswith("/tasks/apply/required_actions")
    become(apply="skipped")
    page.get_by_text("Nothing was changed: it was not approved").wait_for()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for _ in range(4):
        page.clock.fast_forward(60_000)
        page.evaluate("fetch(location.href).then((answer) => answer.text())")  # meanwhile, the page's requests would be answered, too
    assert sum(url.endswith("/taskInstances") for url in requests) <= 1, "it asks once more when it has seen the end"
    for states, shown in (
        ({"plan": "failed", "apply": "upstream_failed"}, "The plan was refused. Nothing was changed."),
        ({"plan": "success", "apply": "success"}, "Rewound"),
    ):
        become(**states)
        page.reload()
        page.get_by_text(shown).wait_for()


def test_rewind_beside_is_requested_and_followed_to_its_end(site: Site, visit: Visit) -> None:
    """What cannot be read beside is refused before it is requested. *Swap* and *Discard* lead to the question of the DAG run."""
    visitor = visit("uma")
    page = visitor.open("groups/tolls/rewind?scenario=to-earliest", "Where to")
    page.get_by_text("It cannot be read beside the live rows. Rewind").wait_for()
    page = visitor.open("groups/fares/rewind?scenario=to-latest", "Where to")
    shown, choice = (
        page.get_by_role("status", name="Preview"),
        page.get_by_label("Read beside the live rows, compare, then swap: readers never see a gap"),
    )
    page.locator("[name=reason]").fill("read everything again")
    choice.check()
    shown.get_by_text("No partition moves back, so nothing would be read beside").wait_for()
    assert page.get_by_role("button", name="Request the rewind …").is_disabled()
    page.get_by_label("Scenario").select_option("undo")
    page.get_by_text("It cannot be read beside the live rows. An undo puts rows back at once.").wait_for()
    assert choice.count() == 0
    page.get_by_label("Scenario").select_option("to-earliest")
    shown.get_by_text("6 offsets read beside the live rows; then, with the swap, 4 rows leave lake.fares.").wait_for()
    assert page.get_by_label("Start a run of the consumer afterwards").count() == 0
    page.get_by_role("button", name="Request the rewind …").click()
    page.get_by_text("The records are read into tables beside lake.fares while its readers see the old rows.").wait_for()
    page.get_by_text("Nothing changes before somebody approves the swap.").wait_for()
    sent = visitor.requests(page.get_by_role("button", name="Request the rewind", exact=True).click)
    conf = {"consumers": ["fares"], "scope": "all", "scenario": "to-earliest", "reason": "read everything again"}
    assert sent["conf"] == conf | {"allow_loss": False, "beside": True, "consume": False}
    run = sent["dag_run_id"]
    become = functools.partial(set_states, site, run)

    fares = site.data.with_runs["fares"]
    rewind_id = site.data.rewind(fares, "all", 0, beside=True, dag_id="rewind", run_id=run)
    become(plan="success", apply="success", replay="running")
    steps = page.get_by_label("Progress").get_by_role("listitem")
    page.get_by_text("Reads beside the live rows: 0 of 6 offsets").wait_for()
    assert "Begun: nothing has changed yet" in steps.nth(1).inner_text()
    with tidy_imports():
        site.data.replay(fares, rewind_id)
    become(replay="success", approve="awaiting_input")
    question = page.get_by_role("link", name="Review and approve it")
    question.wait_for()
    assert (question.get_attribute("href") or "").endswith("/tasks/approve/required_actions")
    page.get_by_role("link", name="What a swap would change").click()
    answers = [page.get_by_role("link", name=name) for name in ("Swap …", "Discard …")]
    answers[0].wait_for()
    assert [(link.get_attribute("href") or "").partition("/runs/")[2] for link in answers] == [
        f"{quote(run)}/tasks/approve/required_actions"
    ] * 2
    assert page.locator("main pre").count() == 0, "there is only one way to approve"
    assert "Failing: expect_column_values_to_be_between" in page.get_by_label("Findings of fares").inner_text()
    for states, failed in (({"approve": "failed"}, "approve"), ({"replay": "failed", "approve": "upstream_failed"}, "replay")):
        become(**states)
        page.get_by_text(f"The task {failed} of its DAG run has failed").wait_for()
        commands = page.locator("main pre").all_inner_texts()
        assert commands == [f'tidemark rewind discard {rewind_id} --reason "…"'], "nothing leads past the approval"

    page = visitor.open(f"groups/fares/rewind?run={quote(run)}", "The replay was not read to its end, or is not valid.")
    become(replay="success", approve="failed")
    page.reload()
    page.get_by_text("The swap was not approved. Nothing was swapped.").wait_for()
    become(approve="success", swap="running")
    page.reload()
    page.get_by_text("Reads the last records, and swaps").wait_for()
    become(swap="success")
    page.get_by_text("Swapped: readers see the new rows").wait_for()
    page.get_by_text("Done", exact=True).wait_for()
    with session(site.data.url) as connection:
        beside.discard(connection, rewind_id, by="ann")
    become(approve="skipped", swap="skipped")
    page.reload()
    page.get_by_text("The replay was discarded. No row was changed.").wait_for()
    page.get_by_role("link", name=f"Rewind {rewind_id}").last.click()
    page.get_by_role("link", name="The audit log says who discarded it, and why.").click()
    page.get_by_text("replay of a rewind discarded").wait_for()
