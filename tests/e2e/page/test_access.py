"""Who may read what on every route of the page, and what no request can do."""

from __future__ import annotations

import itertools
import re
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.e2e.page.data import EVIL
from tests.e2e.page.site import Site
from tests.support.sampling import ALL

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
