"""The documentation's pictures of the page. ``TIDEMARK_SCREENSHOTS=docs/images`` takes them; without it, this file is not collected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.page.data import topic
from tests.e2e.page.site import Site
from tests.e2e.page.visitor import Visit

pytestmark = pytest.mark.needs("chromium")


def test_pictures(site: Site, visit: Visit) -> None:
    visitor = visit("uma")

    def shoot(name: str, theme: str, height: int = 800) -> None:
        visitor.look(1280, theme, height)
        visitor.page.screenshot(path=Path(os.environ["TIDEMARK_SCREENSHOTS"]) / f"{name}.png")

    visitor.open("groups", "blocked")
    shoot("page-groups", "light")
    shoot("page-groups-dark", "dark")
    visitor.open("groups/orders", "Effective spec")
    shoot("page-group", "dark")
    visitor.open("retries/rides", "By error")
    shoot("page-retries", "light")
    page = visitor.open("groups/orders/rewind?scenario=to-offset&value=60", "Where to")
    page.locator("[name=scope]").fill(f"{topic('orders')}:2")
    page.get_by_role("status", name="Preview").get_by_text("100 offsets read again").wait_for()
    shoot("page-rewind-form", "light", 1000)
    (begun,) = (row["rewind_id"] for row in site.json("api/rewinds?consumer=tolls")["rewinds"])
    page = visitor.open(f"rewinds/tolls/{begun}", "What the swap would change")
    page.get_by_role("button", name="Compare").click()
    page.locator("[data-differs]").first.wait_for()
    shoot("page-rewind-beside", "light", 1000)
