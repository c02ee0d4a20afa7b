"""Tidemark's page in Airflow: who may read what on every route, and each view in a real Chromium.

An api-server runs alone; the data comes from real runs on real servers (`tests.e2e.page_data`). With ``TIDEMARK_SCREENSHOTS=folder``,
the tests save the documentation's screenshots in that folder.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import os
import re
import socket
import sqlite3
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page
from tests.e2e.page_data import BROKEN, EVIL, HEALTHY, REASON, Data, topic
from tests.e2e.served import served
from tests.support.kafka_topics import Topics
from tests.support.sampling import ALL
from tests.support.scenario import tidy_imports
from tests.support.waiting import until

from tidemark import migrations
from tidemark.db import rows, session, transaction
from tidemark.kafka.cluster import Cluster
from tidemark.local import LocalStack
from tidemark.local.airflow_settings import connections_env
from tidemark.rewind.plan import MoveRequest
from tidemark.rewind.plan import preview as planned
from tidemark.rewind.plan_model import ToDatetime
from tidemark.rewind.plan_text import groups_as_json
from tidemark.spec import find_consumer
from tidemark.spec.scope import Scope

USERS = {"adam": "admin", "olga": "op", "uma": "user", "vic": "viewer"}
HOME = "plugin/tidemark"
PICTURES_FOLDER = os.environ.get("TIDEMARK_SCREENSHOTS")
Visit = Callable[[str], "Visitor"]


class Site:
    """The api-server and its users. It is served below a base path, as behind a company's proxy."""

    def __init__(self, url: str, home: Path, data: Data) -> None:
        self.url, self.data = url, data
        self.passwords = json.loads((home / "passwords.json").read_text())
        self.routes: list[list[str]] = json.loads((home / "routes").read_text())
        self.parameters: dict[str, list[str]] = json.loads((home / "parameters").read_text())
        self._tokens: dict[str, str] = {}

    def token(self, user: str) -> str:
        if user not in self._tokens:
            login = {"username": user, "password": self.passwords[user]}
            answer = httpx.post(f"{self.url}/auth/token", json=login, trust_env=False, timeout=60)
            assert answer.status_code == 201, answer.text
            self._tokens[user] = answer.json()["access_token"]
        return self._tokens[user]

    def get(self, path: str, user: str = "adam") -> httpx.Response:
        cookies = {"_token": self.token(user)} if user else {}
        return httpx.get(f"{self.url}/tidemark/{path}", cookies=cookies, trust_env=False, timeout=60)

    def pause(self, dag_id: str, paused: bool) -> None:
        headers = {"Authorization": f"Bearer {self.token('adam')}"}
        answer = httpx.patch(f"{self.url}/api/v2/dags/{dag_id}", json={"is_paused": paused}, headers=headers, trust_env=False)
        assert answer.status_code == 200, answer.text

    def json(self, path: str, user: str = "adam") -> Any:
        answer = self.get(path, user)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def site(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("page")
    topics = Topics(stack.kafka.bootstrap_servers())
    url = stack.create_database(f"page_{os.getpid()}")
    migrations.migrate(url)
    data = Data(home, url, topics)
    try:
        with tidy_imports():
            data.make()
            if PICTURES_FOLDER:
                data.make_healthy()
        env = {
            **connections_env(url, {"bootstrap.servers": topics.servers}, "local[1]"),
            "TIDEMARK_TRANSFORMS": str(home / "transforms"),
            "AIRFLOW_CONN_ELSEWHERE": "postgres://nobody@127.0.0.1:1/nowhere",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{name}:{role}" for name, role in USERS.items()),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
        }
        with served(home, env, path="/night/airflow") as where:
            site = Site(where, home, data)
            for name in ("orders", "rides", "fares", "trips", *(HEALTHY if PICTURES_FOLDER else ())):
                site.pause(f"consume__{name}", False)
            if PICTURES_FOLDER:
                data.hide(*HEALTHY)
            yield site
    finally:
        topics.delete_all()


# ---- who may read what

ANYONE = {"": 401, "vic": 200, "uma": 200, "olga": 200, "adam": 200}
EDITORS = ANYONE | {"vic": 403}
OF_ORDERS = {"consumer": "orders", "rewind_id": "1"}
ROUTES: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "/{module}.js": (ANYONE, {"module": "app"}),
    "/api/groups/{consumer}/matching": (ANYONE, {"": "?kind=redrive"}),
    "/api/groups/{consumer}/records/{number}": (EDITORS, {}),
    "/api/groups/{consumer}/rewind-preview": (EDITORS, {"": "?scenario=to-earliest"}),
    "/api/groups/{consumer}/rewinds/{rewind_id}": (ANYONE, OF_ORDERS),
    "/api/groups/{consumer}/rewinds/{rewind_id}/verified": (ANYONE, OF_ORDERS),
    "/api/groups/{consumer}/validations/{validation_id}": (ANYONE, {"validation_id": ""}),
    **{f"/api/groups/{{consumer}}{end}": (ANYONE, {}) for end in ("", "/form", "/records", "/transform", "/retries")},
    **{f"/api/{each}": (ANYONE, {}) for each in ("groups", "rewinds", "trends", "retries", "validations", "audit", "audit.csv")},
}
"""For each route: the status code for each user, and values for its path. The query string is stored under the empty name."""


def test_every_route_has_an_entry_and_only_reads(site: Site) -> None:
    """A new route fails here until someone decides who may read it. Mounts are not allowed, because their files would be unprotected."""
    assert sorted(site.routes) == sorted([path, "GET"] for path in ROUTES)


@pytest.mark.parametrize("user", ANYONE)
def test_route_answers_each_user_as_their_role_allows(site: Site, user: str) -> None:
    number = site.json("api/groups/rides/records")["records"][0]["number"]
    verdict = site.json("api/validations?consumer=rides")["validations"][0]["validation_id"]
    for route, (answers, values) in ROUTES.items():
        path = route.format(**{"consumer": "rides", "number": number} | values | {"validation_id": verdict})
        answer = site.get(path.lstrip("/") + values.get("", ""), user)
        assert (route, answer.status_code) == (route, answers[user]), answer.text
        assert answer.headers["Content-Security-Policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert EVIL not in answer.text or answer.headers["Content-Type"].startswith("application/json")
    assert site.get("docs", user).status_code in (401, 404)
    assert site.get("openapi.json", user).status_code in (401, 404)


@pytest.mark.parametrize(
    "path",
    [
        f"groups/orders/rewinds/{2**63}",
        f"groups/rides/records/{2**63}",
        f"groups/rides/validations/{2**63}",
        f"groups/rides/records?partition={2**31}",
        "groups/rides/records?text=%00",
        "groups/orders/rewind-preview?scenario=to-offset&value=%00",
        "audit?person=%00",
        f"audit?person={'a' * 2_001}",
    ],
)
def test_value_that_no_column_can_hold_is_refused_where_it_enters(site: Site, path: str) -> None:
    assert site.get(f"api/{path}").status_code == 422


HOSTILE = (
    *("", "/etc/hostname", "file:///etc/hostname", "../../../../etc/hostname", "{url}", "%", "\0", "a\0b", "\ud800", "\x1b[31m", "';--"),
    *("FROM-FILE", " from-file ", "true", "-1", "1.5", str(2**31), str(2**63), "9" * 100, "x" * 50_000, "[" * 2_000, "orders", "rides"),
)
"""Sent in place of each parameter of each route."""


def test_no_value_of_a_parameter_opens_a_file_or_an_address_or_ends_in_a_traceback(site: Site) -> None:
    """Whatever is sent, the answer is what was asked for, or says that it is refused. In ``make test``, each parameter gets some values."""
    secret = Path("/etc/hostname").read_text().strip() or "/etc/hostname"
    wrong = []
    values = itertools.cycle(HOSTILE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        for route, (_, usual) in ROUTES.items():
            path = {"consumer": "rides", "number": "1", "module": "app", "rewind_id": "1", "validation_id": "1"} | usual
            query = {"scenario": "to-earliest"} if "preview" in route else {}
            for name in [*re.findall(r"{(\w+)}", route), *site.parameters[route]]:
                for value in HOSTILE if ALL else itertools.islice(values, 5):
                    sent = quote(value.replace("{url}", url), safe="", errors="surrogatepass")
                    asked = {each: quote(text) for each, text in query.items()} | ({name: sent} if name in site.parameters[route] else {})
                    words = "&".join(f"{each}={text}" for each, text in asked.items())
                    answer = site.get(f"{route.format(**path | {name: sent})}?{words}".lstrip("/"))
                    if answer.status_code not in (200, 400, 403, 404, 414, 422) or (secret in answer.text and value != secret):
                        wrong.append((route, name, value[:30], answer.status_code, answer.text[:200]))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert wrong == []


def test_viewer_sees_no_payload(site: Site) -> None:
    """A viewer sees neither payloads of records nor values that an expectation observed, and is offered no form."""
    verdict = next(row for row in site.json("api/validations?consumer=fares")["validations"] if row["verdict"] == "critical")
    path = f"api/groups/fares/validations/{verdict['validation_id']}"
    seen = {user: site.json(path, user) for user in ("vic", "uma")}
    assert [any(one["observed"] for one in each["results"]) for each in seen.values()] == [False, True]
    assert [row["offset"] for row in seen["vic"]["results"][1]["rows"]] == [3, 4]
    assert site.json("api/groups/rides/form", "vic")["forms"] == {"rewind": None, "redrive": None, "discard": None}
    assert site.json("api/groups/rides/form", "uma")["forms"] == {"rewind": "rewind", "redrive": "redrive", "discard": "discard"}


# ---- what the routes say


def test_groups_are_worst_first_and_say_why(site: Site) -> None:
    """A file with problems is listed with them. An unreachable database becomes a banner, and all other groups are shown."""
    found = site.json("api/groups")
    assert [(row["consumer"], row["health"]) for row in found["groups"]] == [
        ("bad", "bad spec"),
        ("away", "unreachable"),
        ("trips", "run failed"),
        ("fares", "blocked"),
        ("rides", "records failed"),
        ("orders", "replaying"),
    ]
    bad, away, trips, _, rides, orders = found["groups"]
    assert [each["at"] for each in bad["problems"]] == ["bad.yaml:4:11", "bad.yaml:5:1"]
    assert ([banner["connection"] for banner in found["banners"]], "elsewhere" in away["why"]) == (["elsewhere"], True)
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
    assert site.get(f"api/groups/rides/rewinds/{applied['rewind_id']}").status_code == 404


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
    away = asked("away", scenario="to-earliest")
    assert (away["problems"], away["groups"], "refused" in away["unknown"]) == ([], [], True)


# ---- in the browser

chromium = pytest.mark.needs("chromium")


class Visitor:
    """A page of a signed-in user, and the errors that their browser reported."""

    def __init__(self, context: BrowserContext, site: Site) -> None:
        self.site = site
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._hear)

    def open(self, path: str, shows: str) -> Page:
        self.page.goto(f"{self.site.url}/{HOME}/{path}")
        self.page.locator("main").get_by_text(shows).locator("visible=true").first.wait_for()
        return self.page

    def look(self, width: int, theme: str) -> None:
        """Resizes the window and switches to ``light`` or ``dark``, as another window of the same browser would."""
        self.page.set_viewport_size({"width": width, "height": 800})
        self.page.evaluate(
            """theme => {
              localStorage.setItem('theme', theme)
              window.dispatchEvent(new StorageEvent('storage', { key: 'theme', newValue: theme }))
            }""",
            theme,
        )
        until(lambda: self._is_dark() is (theme == "dark"), f"the theme is {theme}", within_s=20)

    def _is_dark(self) -> bool:
        shade = self.page.evaluate("getComputedStyle(document.querySelector('main')).color")  # the color of the text
        lightness = re.fullmatch(r"oklch\(([\d.]+) .*\)", shade)
        assert lightness, shade
        return float(lightness[1]) > 0.5

    def requests(self, press: Callable[[], None]) -> Any:
        """Presses the last button of a form, and returns the Airflow run that it has started."""
        with self.page.expect_response(lambda answer: answer.request.method == "POST" and "/dagRuns" in answer.url) as sent:
            press()
        assert sent.value.status == 200, sent.value.text()
        return sent.value.json()

    def cut_off(self, routes: str) -> None:
        """From now on, the server does not answer these requests. What the console says no longer counts."""
        self.page.remove_listener("console", self._hear)
        self.page.route(routes, lambda route: route.abort())

    def _hear(self, said: ConsoleMessage) -> None:
        if said.type == "error":
            self.errors.append(said.text)

    def shoot(self, name: str) -> None:
        if name and PICTURES_FOLDER:
            self.page.screenshot(path=Path(PICTURES_FOLDER) / f"{name}.png")


@pytest.fixture(scope="module")
def contexts(browser: Browser, site: Site) -> Callable[[str], BrowserContext]:
    """A browser's profile for each user, with its cache."""

    @functools.cache
    def of(user: str) -> BrowserContext:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light", timezone_id="UTC")
        context.add_cookies([{"name": "_token", "value": site.token(user), "url": site.url}])
        context.set_default_timeout(20_000)
        return context

    return of


@pytest.fixture
def visit(contexts: Callable[[str], BrowserContext], site: Site) -> Iterator[Visit]:
    """Opens a page for a user. Checks at the end that the browser has reported no error."""
    visitors: list[Visitor] = []

    def start(user: str) -> Visitor:
        visitors.append(Visitor(contexts(user), site))
        return visitors[-1]

    yield start
    for visitor in visitors:
        visitor.page.close()
        assert visitor.errors == []


def views(site: Site) -> dict[str, tuple[str, str]]:
    """Returns the address of each view, and a text that it shows."""
    number = next(row["number"] for row in site.json("api/groups/rides/records")["records"] if "no city" in row["error_text"])
    verdict = next(
        row["validation_id"] for row in site.json("api/validations?consumer=fares")["validations"] if row["verdict"] == "critical"
    )
    applied = next(row["rewind_id"] for row in site.json("api/rewinds?consumer=orders")["rewinds"] if row["state"] == "APPLIED")
    return {
        "groups": ("groups", "blocked"),
        "group": ("groups/orders", "Effective spec"),
        "group-failed": ("groups/trips", "it does not exist in lake.trips"),
        "group-bad": ("groups/bad", "asignment"),
        "group-away": ("groups/away", "does not answer"),
        "rewinds": ("rewinds", REASON),
        "rewind": (f"rewinds/orders/{applied}", "Read again"),
        "rewind-form": ("groups/orders/rewind?scenario=to-offset&value=7", "Where to"),
        "retries": ("retries", "Most frequent error"),
        "retries-of": ("retries/rides", "By error"),
        "record": (f"retries/rides/{number}", "Headers"),
        "redrive-form": ("groups/rides/redrive?error=Fail", "Record numbers"),
        "discard-form": ("groups/rides/discard?state=FAILED", "never tried again"),
        "transform": ("groups/rides/transform", "def transform"),
        "validations": ("validations", "critical"),
        "validation": (f"validations/fares/{verdict}", "Failing rows"),
        "audit": ("audit", "rewind applied"),
        "terms": ("terms", "Validated offset"),
    }


PICTURES = {
    ("group", "dark"): "page-group",
    ("retries-of", "light"): "page-retries",
}
"""The documentation's screenshots of views as the other tests see them, by view and theme."""


@chromium
def test_each_view_opens_by_its_address_without_an_error_light_dark_and_on_a_phone(
    site: Site, visit: Visit, pytestconfig: pytest.Config
) -> None:
    """At 400 pixels, only charts, tables and texts scroll sideways within their boxes. Every link keeps the base path."""
    visitor = visit("adam")
    base = httpx.URL(site.url).path
    assert base == "/night/airflow"
    looks = ((1280, "dark"), (1280, "light"), (400, "light"))
    whole = ALL or PICTURES_FOLDER is not None
    half = int(pytestconfig.getoption("randomly_seed", 0)) % 2  # the other tests open most of the views, too
    for number, (name, (path, shows)) in enumerate(views(site).items()):
        if not whole and number % 2 == half:
            continue
        page = visitor.open(path, shows)
        for width, theme in looks if whole else (looks[number % 3],):
            visitor.look(width, theme)
            for box in ("document.documentElement", "document.querySelector('main')"):
                fits = f"(() => {{ const box = {box}; return box.scrollWidth <= box.clientWidth }})()"
                until(lambda page=page, fits=fits: page.evaluate(fits), f"{name} fits into {width} pixels", within_s=5)  # type: ignore[misc]
            if width == 1280:
                visitor.shoot(PICTURES.get((name, theme), ""))
        links = page.locator("main a[href], nav[aria-label=Tidemark] a[href]").evaluate_all(
            "all => all.map(one => new URL(one.getAttribute('href'), document.baseURI).pathname)"
        )
        assert links
        assert [link for link in links if not link.startswith(f"{base}/")] == []
    if PICTURES_FOLDER:
        site.data.hide(*BROKEN)
        site.data.show(*HEALTHY)
        visitor.open("groups", "blocked")
        for theme, picture in (("light", "page-groups"), ("dark", "page-groups-dark")):
            visitor.look(1280, theme)
            visitor.shoot(picture)
        site.data.hide(*HEALTHY)
        site.data.show(*BROKEN)


@chromium
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


@chromium
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


@chromium
def test_group_shows_rates_rebalances_the_fenced_try_and_deletes(site: Site, visit: Visit) -> None:
    """Each mark in the charts has a title. The links lead to the transform's source and to Airflow's code tab."""
    visitor = visit("vic")
    page = visitor.open("groups/orders", "Effective spec")
    assert {"In / s", "Out / s", "Owner", "Epoch", "Validated to", "End"} <= set(
        page.get_by_label("Partitions").get_by_role("columnheader").all_inner_texts()
    )
    titles = page.locator("svg[aria-label^='Lag over time'] title").all_text_contents()
    assert sum("a member leaves" in each and each.startswith("generation ") for each in titles) == 2
    assert sum(each.startswith("rewind ") for each in titles) == 1
    assert sum(" failed" in each for each in titles) == 0, "a takeover is no failed run"
    assert sum("took over" in each for each in page.locator("svg[aria-label*='batches of'] title").all_text_contents()) == 1
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
    titles = page.locator("svg[aria-label*='batches of'] title").all_text_contents()
    assert [title.partition("; ")[2] for title in titles] == ["4 loaded, 0 to retry, 0 failed, 1 delete", "2 loaded, 0 to retry, 0 failed"]


FOCUSED = """(() => {
  const one = document.activeElement, style = getComputedStyle(one);
  return { name: one.getAttribute('aria-label') ?? one.name ?? '', text: one.innerText ?? '',
    seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0 || style.boxShadow !== 'none' };
})()"""


@chromium
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
    page.get_by_text("1 of 6").wait_for()
    assert page.url.endswith("/groups?q=trips")
    tab_to("Filter by health")
    tab_to("trips")
    page.keyboard.press("Enter")
    page.get_by_text("Effective spec").wait_for()
    assert page.url == f"{site.url}/{HOME}/groups/trips"
    page.go_back()
    page.get_by_text("1 of 6").wait_for()
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


@chromium
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


@chromium
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
    assert page.get_by_role("slider").count() == page.get_by_role("link", name="Rewind to before").count() == 0
    page.get_by_role("img", name="Lag over time").wait_for()


@chromium
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
    page.set_viewport_size({"width": 1280, "height": 1000})
    visitor.shoot("page-rewind-form")
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


@chromium
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


@chromium
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
        assert all("+09:00" in each for each in page.locator("svg[aria-label^='Lag over time'] circle title").all_text_contents())
    finally:
        page.evaluate("localStorage.removeItem('timezone')")


@chromium
def test_requested_run_is_followed_to_its_end(site: Site, visit: Visit) -> None:
    """From its request to the approval, and to what was not done; then it asks no more. The tasks' states are set in Airflow's database,
    as a scheduler would."""
    visitor = visit("uma")
    visitor.page.clock.install()
    page = visitor.open("groups/rides/rewind?scenario=to-earliest", "Where to")
    page.locator("[name=reason]").fill("read everything again")
    page.get_by_role("button", name="Request the rewind …").click()
    page.get_by_text("Rows loaded from there on are taken out of lake.rides").wait_for()
    assert not page.locator("pre").is_visible()
    run = visitor.requests(page.get_by_role("button", name="Request the rewind", exact=True).click)["dag_run_id"]
    page.get_by_text("check that the DAG rewind is not paused").wait_for()

    def become(**states: str) -> None:
        with contextlib.closing(sqlite3.connect(site.data.folder / "airflow.db", timeout=30)) as airflow, airflow:
            for task, state in states.items():
                assert airflow.execute("UPDATE task_instance SET state = ? WHERE run_id = ? AND task_id = ?", (state, run, task)).rowcount

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


@chromium
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


@chromium
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
