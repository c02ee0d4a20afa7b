"""Waiting and failed records in a real Chromium, and the forms for them."""

from __future__ import annotations

import pytest
from tests.e2e.page.data import EVIL
from tests.e2e.page.site import Site
from tests.e2e.page.visitor import Visit, views

pytestmark = pytest.mark.needs("chromium")


def test_payload_that_is_a_script_is_shown_as_text_and_does_not_run(site: Site, visit: Visit) -> None:
    """The value, a header, the key and the error's text contain markup. The payload is shown as text and as hex."""
    visitor = visit("uma")
    path, _ = views(site)["record"]
    page = visitor.open(path, "Headers")
    assert page.locator("[data-payload=text]").all_inner_texts() == [EVIL] * 3
    page.get_by_role("button", name="hex").first.click()
    assert page.locator("[data-payload=hex]").first.inner_text().startswith("3c 73 63 72")
    assert page.evaluate("globalThis.stolen") is None
    assert page.locator("main script, main img").count() == 0
    visitor.open("retries/rides", "no city: <script>")
    assert visitor.page.evaluate("globalThis.stolen") is None


def test_records_on_screen_are_redriven_or_discarded_under_the_users_name(site: Site, visit: Visit) -> None:
    """The forms have the filter of the list, of an error's row, or the records selected. Without a filter or a record, a discard cannot be
    requested."""
    visitor = visit("uma")
    page = visitor.open("retries/rides?state=FAILED&text=carrier", "no carrier")
    page.get_by_label("Records", exact=True).get_by_text("no city").wait_for(state="detached")
    page.get_by_role("link", name="Redrive the failed ones …").click()
    page.locator("[name=reason]").fill("the carrier is known now")
    page.get_by_role("status", name="Matching records").get_by_text("1 record can be redriven now").wait_for()
    assert page.locator("[name=text]").input_value() == "carrier"
    page.get_by_role("button", name="Request the redrive …").click()
    asked = {"consumer": "rides", "text": "carrier", "to": "ladder", "then": "ask", "reason": "the carrier is known now"}
    assert visitor.requests(page.get_by_role("button", name="Request the redrive", exact=True).click)["conf"] == asked
    page.get_by_role("main").get_by_role("link", name="Retries").click()
    page.get_by_text("By error").wait_for()

    page = visitor.open("retries/rides", "By error")
    errors = page.get_by_label("Errors")
    errors.get_by_text("growing").first.wait_for()
    errors.get_by_role("row").filter(has=page.get_by_text("FAILED", exact=True)).get_by_role("link", name="Discard …").click()
    page.locator("[name=reason]").fill("test rides of last week")  # in the form; the list has a state, too
    assert page.get_by_label("State").input_value() == "FAILED"
    ask = page.get_by_role("button", name="Request the discard …")
    page.locator("[name=error]").fill("")
    page.get_by_label("State").select_option("")
    page.get_by_text("Choose records").wait_for()
    assert ask.is_disabled()
    page.get_by_label("State").select_option("FAILED")
    page.locator("[name=numbers]").fill("99999")
    page.get_by_text("No record matches").wait_for()
    assert ask.is_disabled()

    page = visitor.open("retries/rides?state=FAILED", "no carrier")
    page.get_by_text("2 records", exact=True).wait_for()
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("link", name="Discard 2 selected …").click()
    numbers = page.locator("[name=numbers]").input_value()
    assert sorted(map(int, numbers.split(", "))) == [one["number"] for one in site.json("api/groups/rides/records?state=FAILED")["records"]]
    page.locator("[name=reason]").fill("test rides of last week")
    page.get_by_role("status", name="Matching records").get_by_text("2 records would be discarded now").wait_for()
    ask.click()
    page.get_by_text("2 records of rides are settled without being loaded").wait_for()
    run = visitor.requests(page.get_by_role("button", name="Request the discard", exact=True).click)
    assert (run["dag_id"], run["triggering_user_name"]) == ("discard", "uma")
    assert run["conf"] == {"consumer": "rides", "numbers": numbers, "then": "ask", "reason": "test rides of last week"}


def test_consumers_with_failed_records_are_searched_and_nothing_is_offered_without_a_record(visit: Visit) -> None:
    visitor = visit("uma")
    page = visitor.open("retries?q=busy", "1 of 1")
    page.get_by_label("Search retries").fill("busy orders")
    page.get_by_text("Nothing matches").wait_for()
    assert page.url.endswith("/retries?q=busy+orders")
    page = visitor.open("retries/orders", "0 records")
    assert page.get_by_role("link", name="…").count() == 0
