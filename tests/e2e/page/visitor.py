"""A user who looks at the page in a real Chromium, and the views."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import BrowserContext, ConsoleMessage, Page
from tests.e2e.page.data import REASON
from tests.e2e.page.site import Site
from tests.support.waiting import until

HOME = "plugin/tidemark"
Visit = Callable[[str], "Visitor"]


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

    def look(self, width: int, theme: str, height: int = 800) -> None:
        """Resizes the window and switches to ``light`` or ``dark``, as another window of the same browser would."""
        self.page.set_viewport_size({"width": width, "height": height})
        self.page.evaluate(
            """theme => {
              localStorage.setItem('theme', theme)
              window.dispatchEvent(new StorageEvent('storage', { key: 'theme', newValue: theme }))
            }""",
            theme,
        )
        until(lambda: self._is_dark() is (theme == "dark"), f"the theme is {theme}", within_s=60)

    def _is_dark(self) -> bool:
        shade = self.page.evaluate("getComputedStyle(document.querySelector('main')).color")  # the color of the text
        lightness = re.fullmatch(r"oklch\(([\d.]+) .*\)", shade)
        assert lightness, shade
        return float(lightness[1]) > 0.5

    def titles(self, chart: str, mark: str = "") -> list[str]:
        """The titles of the marks in a chart with this attribute. A chart is drawn a moment after its view has opened, when its width is
        known."""
        found = self.page.locator(f"svg[{chart}] {mark} title")
        found.first.wait_for(state="attached")
        return found.all_text_contents()

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


def views(site: Site) -> dict[str, tuple[str, str]]:
    """Returns the address of each view, and a text that it shows."""
    number = next(row["number"] for row in site.json("api/groups/rides/records")["records"] if "no city" in row["error_text"])
    verdict = next(
        row["validation_id"] for row in site.json("api/validations?consumer=fares")["validations"] if row["verdict"] == "critical"
    )
    applied = next(row["rewind_id"] for row in site.json("api/rewinds?consumer=orders")["rewinds"] if row["state"] == "APPLIED")
    (begun,) = (row["rewind_id"] for row in site.json("api/rewinds?consumer=tolls")["rewinds"])
    return {
        "groups": ("groups", "blocked"),
        "group": ("groups/orders", "Effective spec"),
        "group-failed": ("groups/trips", "it does not exist in lake.trips"),
        "group-bad": ("groups/bad", "asignment"),
        "group-away": ("groups/away", "does not answer"),
        "rewinds": ("rewinds", REASON),
        "rewind": (f"rewinds/orders/{applied}", "Read again"),
        "rewind-beside": (f"rewinds/tolls/{begun}", "What the swap would change"),
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
