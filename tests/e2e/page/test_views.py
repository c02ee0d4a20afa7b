"""The page's views in a real Chromium."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Route
from tests.e2e.page.data import EVIL
from tests.e2e.page.site import Site
from tests.e2e.page.visitor import HOME, Visit, views
from tests.support.sampling import ALL
from tests.support.waiting import until

pytestmark = pytest.mark.needs("chromium")


def test_each_view_opens_by_its_address_without_an_error_light_dark_and_on_a_phone(
    site: Site, visit: Visit, pytestconfig: pytest.Config
) -> None:
    """At 400 pixels, only charts, tables and texts scroll sideways within their boxes. Every link keeps the base path."""
    visitor = visit("adam")
    base = httpx.URL(site.url).path
    assert base == "/night/airflow"
    looks = ((1280, "dark"), (1280, "light"), (400, "light"))
    half = int(pytestconfig.getoption("randomly_seed", 0)) % 2  # the other tests open most of the views, too
    for number, (name, (path, shows)) in enumerate(views(site).items()):
        if not ALL and number % 2 == half:
            continue
        page = visitor.open(path, shows)
        for width, theme in looks if ALL else (looks[number % 3],):
            visitor.look(width, theme)
            for box in ("document.documentElement", "document.querySelector('main')"):
                fits = f"(() => {{ const box = {box}; return box.scrollWidth <= box.clientWidth }})()"
                until(lambda page=page, fits=fits: page.evaluate(fits), f"{name} fits into {width} pixels", within_s=60)  # type: ignore[misc]
        links = page.locator("main a[href], nav[aria-label=Tidemark] a[href]").evaluate_all(
            "all => all.map(one => new URL(one.getAttribute('href'), document.baseURI).pathname)"
        )
        assert links
        assert [link for link in links if not link.startswith(f"{base}/")] == []


def test_first_screen_of_a_group_says_what_is_wrong_how_far_behind_it_is_and_what_fixes_it(site: Site, visit: Visit) -> None:
    """In a window of 1280 by 800, without scrolling. The notice has the number, an error, and first the button that fixes it."""
    visitor = visit("uma")
    page = visitor.open("groups/rides", "Effective spec")
    page.set_viewport_size({"width": 1280, "height": 800})
    notice = page.get_by_role("status").filter(has_text="2 records failed with Fail, for example: ")
    assert notice.get_by_role("link").all_inner_texts() == ["Redrive …", "Failed records", "Discard …"]
    now = page.get_by_label("Now", exact=True)
    for shown in (
        notice.get_by_role("link").first,
        now.get_by_text("sampled"),
        now.get_by_text("2 failed"),
        page.get_by_label("Partitions").get_by_role("row").last,
    ):
        box = shown.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 800
    page = visitor.open("groups/away", "Effective spec")
    assert page.get_by_text("0 failed").count() == page.get_by_text("No partition has been claimed yet").count() == 0
    page = visitor.open("groups/fares", "Failing: expect_column_values_to_be_between")
    assert page.get_by_role("alert").get_by_role("link").all_inner_texts() == ["Failing rows", "Rewind to the validated rows …"]
    page.get_by_role("link", name="Failing rows").click()
    page.get_by_role("heading", name="of fares").wait_for()
    page.get_by_role("link", name="Group", exact=True).click()
    page.get_by_text("Effective spec").wait_for()


def test_group_shows_rates_rebalances_the_fenced_try_and_deletes(site: Site, visit: Visit) -> None:
    """Each mark in the charts has a title. The links lead to the transform's source and to Airflow's code tab."""
    visitor = visit("vic")
    page = visitor.open("groups/orders", "Effective spec")
    assert {"In / s", "Out / s", "Owner", "Epoch", "Validated to", "End"} <= set(
        page.get_by_label("Partitions").get_by_role("columnheader").all_inner_texts()
    )
    titles = visitor.titles("aria-label^='Lag over time'")
    assert sum("a member leaves" in each and each.startswith("generation ") for each in titles) == 2
    assert sum(each.startswith("rewind ") for each in titles) == 1
    assert sum(" failed" in each for each in titles) == 0, "a takeover is no failed run"
    assert sum("took over" in each for each in visitor.titles("aria-label*='batches of'")) == 1
    page.get_by_label("Attempts").get_by_text("nothing was loaded twice").wait_for()
    for name in ("About this group", "Members", "Rebalances"):
        page.get_by_role("heading", name=name).click()
    page.get_by_label("Rebalances").get_by_text("consume__orders/consume/1 → nobody").wait_for()
    page.get_by_label("Members").get_by_text("shop.orders:0-2").wait_for()
    assert (page.get_by_role("link", name="code", exact=True).get_attribute("href") or "").endswith("/dags/consume__orders/code")
    page.get_by_role("link", name="orders:transform").click()
    page.get_by_text("def transform(record: Record) -> dict | Delete:").wait_for()

    page = visitor.open("groups/fares", "Effective spec")
    assert page.get_by_label("Attempts").get_by_text("delete").all_inner_texts() == ["1 delete"]
    titles = visitor.titles("aria-label*='batches of'")
    assert [title.partition("; ")[2] for title in titles] == ["4 loaded, 0 to retry, 0 failed, 1 delete", "2 loaded, 0 to retry, 0 failed"]


FOCUSED = """(() => {
  const one = document.activeElement, style = getComputedStyle(one);
  return { name: one.getAttribute('aria-label') ?? one.name ?? '', text: one.innerText ?? '',
    seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== 'none' };
})()"""


def test_from_a_red_group_to_the_cause_and_to_a_rewind_with_the_keyboard_alone(site: Site, visit: Visit) -> None:
    """Tab reaches the views, search, filter, rows and form, each with a visible focus. Enter opens links and presses buttons. Going back
    and a reload keep the view. The requested Airflow run has the user's name and the form's values."""
    visitor = visit("uma")
    page = visitor.open("groups", "run failed")

    def tab_to(name: str) -> None:
        """Presses Tab until the element with this label, field name or text has the focus."""
        passed = []
        for _ in range(80):
            page.keyboard.press("Tab")
            focused = page.evaluate(FOCUSED)
            passed.append(focused["name"] or focused["text"])
            if name in (focused["name"], focused["text"].strip()):
                assert focused["seen"], f"no focus to be seen on {name}"
                return
        raise AssertionError(f"Tab does not reach {name}: {passed}")

    for name in ("Retries", "Search groups"):
        tab_to(name)
    page.keyboard.type("trips", delay=200)  # at a person's pace: the field keeps the focus while the address changes
    page.get_by_text("1 of 7").wait_for()
    assert page.url.endswith("/groups?q=trips")
    tab_to("Filter by health")
    tab_to("trips")
    page.keyboard.press("Enter")
    page.get_by_text("Effective spec").wait_for()
    assert page.url == f"{site.url}/{HOME}/groups/trips"
    page.go_back()
    page.get_by_text("1 of 7").wait_for()
    assert page.get_by_label("Search groups").input_value() == "trips"
    page.go_forward()
    page.reload()
    page.get_by_text("it does not exist in lake.trips").first.wait_for()
    assert "/dags/consume__trips/runs/" in (page.get_by_role("link", name="Task log").get_attribute("href") or "")
    tab_to("Rewind …")
    page.keyboard.press("Enter")
    page.get_by_label("Scenario").wait_for()
    for name, typed in (("Scenario", "This offset"), ("value", "1"), ("reason", "the column fare exists now")):
        tab_to(name)
        page.keyboard.type(typed)
    tab_to("Request the rewind …")
    page.keyboard.press("Enter")
    page.get_by_text("Check once more").wait_for()
    assert page.evaluate(FOCUSED)["text"] == "Request the rewind"
    run = visitor.requests(lambda: page.keyboard.press("Enter"))
    assert (run["dag_id"], run["triggering_user_name"]) == ("rewind", "uma")
    asked = {"consumers": ["trips"], "scope": "all", "scenario": "to-offset", "value": "1", "reason": "the column fare exists now"}
    assert run["conf"] == asked | {"allow_loss": False, "consume": True}
    page.get_by_role("link", name=run["dag_run_id"]).wait_for()


def test_page_refreshes_itself_and_says_when_it_cannot(site: Site, visit: Visit) -> None:
    """A new state appears without a reload, and the page keeps its elements. If the server does not answer, the last data stays visible,
    with a notice."""
    visitor = visit("vic")
    page = visitor.open("groups", "replaying")
    row = page.get_by_role("link", name="orders", exact=True).element_handle()
    orders = page.get_by_role("row").filter(has=page.get_by_role("link", name="orders", exact=True))
    try:
        site.pause("consume__orders", True)
        orders.get_by_text("DAG paused").wait_for()
    finally:
        site.pause("consume__orders", False)
    orders.get_by_text("DAG paused").wait_for(state="detached")
    assert row is not None
    assert row.evaluate("element => element.isConnected")
    visitor.cut_off("**/tidemark/api/**")
    page.get_by_text("does not answer. The page asks again by itself").first.wait_for()
    assert page.get_by_role("link", name="orders", exact=True).is_visible()


def test_long_list_is_drawn_in_parts_and_searched_as_a_whole(visit: Visit) -> None:
    visitor = visit("vic")

    def multiply(route: Route) -> None:
        answer = route.fetch()
        known = answer.json()
        rows = [row | {"consumer": f"{row['consumer']}_{number}"} for number in range(100) for row in known["groups"]]
        route.fulfill(response=answer, json=known | {"groups": rows})

    visitor.page.route("**/tidemark/api/groups", multiply)
    page = visitor.open("groups", "50 of 700")
    assert page.get_by_label("Filter by health").get_by_role("option", name="blocked (100)").count() == 1
    consumers = page.get_by_label("Groups", exact=True).get_by_role("link", name=re.compile(r"_\d+$"))
    assert consumers.count() == 50
    page.get_by_role("button", name="Show more").click()
    page.get_by_text("100 of 700").wait_for()
    assert consumers.count() == 100
    page.get_by_label("Search groups").fill("orders_99")
    page.get_by_text("1 of 700").wait_for()
    assert consumers.all_inner_texts() == ["orders_99"]


def test_replay_is_compared_side_by_side_and_rows_are_text(site: Site, visit: Visit) -> None:
    """Scripts in a row do not run, and rows are shown only to users who may see payloads."""
    (rewind_id,) = (row["rewind_id"] for row in site.json("api/rewinds?consumer=trips")["rewinds"])
    path = f"rewinds/trips/{rewind_id}"
    found = {user: site.json(f"api/groups/{path.replace('rewinds/trips', 'trips/rewinds')}/verified", user) for user in ("vic", "uma")}
    counts = [{name: group[name] for name in ("equal", "changed", "gone", "new")} for each in found.values() for group in each["groups"]]
    assert counts == [{"equal": 0, "changed": 2, "gone": 0, "new": 0}] * 2
    assert [len(each["groups"][0]["examples"]) for each in found.values()] == [0, 2]

    visitor = visit("uma")
    page = visitor.open(path, "What the replay has changed")
    page.get_by_role("button", name="Compare").click()
    page.get_by_text("table lake.trips: 2 offsets read again").wait_for()
    assert page.locator("[data-verdict=changed]").inner_text() == "2"
    differs = page.locator("[data-differs]")
    assert differs.first.inner_text().split("\t") == ["note ≠", EVIL, "null"]
    assert differs.count() == 2
    assert (page.evaluate("globalThis.stolen"), page.locator("main script, main img").count()) == (None, 0)


def test_replay_beside_is_compared_with_the_live_rows_and_ends_with_a_command(site: Site, visit: Visit) -> None:
    """Begun on the command line, so the page shows what to enter there. The group's first screen leads to it."""
    (rewind_id,) = (row["rewind_id"] for row in site.json("api/rewinds?consumer=tolls")["rewinds"])
    visitor = visit("uma")
    page = visitor.open("groups/tolls", "Effective spec")
    notice = page.get_by_role("status").filter(has_text=f"Rewind {rewind_id} is read beside the live rows: 8 of 9 offsets")
    notice.get_by_text("Readers see the old rows, and the group reads on, until the swap. Begun by ann").wait_for()
    assert page.get_by_label("Rewind to before attempt").count() == 2, "no rewind starts from what a replay has read"
    notice.get_by_role("link", name="Compare, swap or discard …").click()
    page.get_by_text("It was begun on the command line").wait_for()
    commands = [f"tidemark rewind swap {rewind_id}", f'tidemark rewind discard {rewind_id} --reason "…"']
    assert page.locator("main pre").all_inner_texts() == commands
    assert page.get_by_role("link", name="Swap …").count() == 0
    assert page.get_by_text("READ BESIDE", exact=True).count() == 1
    assert page.get_by_role("progressbar").get_attribute("aria-valuenow") == "8"
    findings = page.get_by_label("Findings of tolls").get_by_role("listitem").all_inner_texts()
    assert [text.split(",")[0] for text in findings] == ["Validation passed 7 rows", "1 record not loaded: Fail no such class"]
    rows = page.get_by_role("table", name="Replay of tolls").get_by_role("row").all_inner_texts()
    assert [row.split("\t")[1:] for row in rows[1:]] == [["0", "5", "6", "5", "1"], ["0", "3", "3", "3", "0"]]

    page.get_by_role("button", name="Compare").click()
    page.get_by_text("table lake.tolls: 8 offsets read beside, 1 still to read").wait_for()
    counts = {name: page.locator(f"[data-verdict={name}]").inner_text() for name in ("equal", "changed", "gone", "new")}
    assert counts == {"equal": "2", "changed": "4", "gone": "1", "new": "1"}
    assert page.get_by_role("table").filter(has_text="changed").first.get_by_role("columnheader").all_inner_texts() == [
        "Column",
        "Live",
        "Replay",
    ]
    assert page.locator("[data-differs]").first.inner_text().split("\t") == ["number ≠", "20", "10"]
    (unseen,) = site.json(f"api/groups/tolls/rewinds/{rewind_id}/verified", "vic")["groups"]
    assert (unseen["changed"], unseen["examples"]) == (4, [])

    page = visitor.open("rewinds?state=BESIDE", f"Rewind {rewind_id}")
    assert page.get_by_label("Filter by state").locator("option:checked").inner_text() == "read beside"
    assert page.get_by_role("row").count() == 2
    page = visitor.open("audit?consumer=tolls&kind=REWIND", "rewind begun beside")
