"""A person rewinds a group that is reading: form, plan, approval and undo in a real browser, on the pages of a real Airflow.

With ``TIDEMARK_SCREENSHOTS=folder``, the test saves the documentation's screenshots in that folder. Run it alone then, because
the pages also show the runs of other tests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Locator, Page
from tests.e2e.lab import Consumer, Lab
from tests.e2e.rewinds import DAG, RewindRun
from tests.support.waiting import until

WIDTH, HEIGHT = 1280, 720
TALL = 1300
"""The height of a window for the form with a section open."""
TARGET, WRONG = 20, 30
"""The offset to rewind to, and the minimum number of wrong rows in each partition."""

pytestmark = pytest.mark.needs("chromium")


class Person:
    """A signed-in user, and the page that they look at."""

    def __init__(self, lab: Lab, page: Page) -> None:
        self.lab, self.page = lab, page
        self._shots = os.environ.get("TIDEMARK_SCREENSHOTS")

    def asks(self, consumer: str, scenario: str, value: str, reason: str, *, shot: str = "") -> RewindRun:
        """Fills in the form and submits it."""
        self._open(f"dags/{DAG}")
        self.page.get_by_role("button", name="Trigger").first.click()
        dialog = self.page.locator("[role=dialog][aria-modal=true]")
        what = self._section(dialog, "What to rewind")
        what.get_by_role("combobox").click()
        self.page.get_by_role("option", name=f"{consumer}: ").click()
        why = self._section(dialog, "Why, and how")
        why.locator("[name=element_reason]").fill(reason)
        where = self._section(dialog, "Where to")
        where.get_by_role("combobox").first.click()
        self.page.get_by_role("option", name=f"{scenario}: ").click()
        where.locator("[name=element_value]").fill(value)
        self._shoot(shot, TALL)
        with self.page.expect_response(lambda answer: answer.request.method == "POST" and "/dagRuns" in answer.url) as sent:
            dialog.get_by_role("button", name="Trigger", exact=True).click()
        run = RewindRun(self.lab, DAG, sent.value.json()["dag_run_id"])
        self._leave()
        return run

    def reads_the_plan(self, run: RewindRun) -> str:
        """Returns the text of the page on which the plan is approved or rejected."""
        run.question()
        self._open(f"dags/{DAG}/runs/{quote(run.run_id, safe='')}/tasks/apply/required_actions")
        self.page.get_by_role("button", name="Approve").wait_for()
        return self.page.locator("table").last.locator("xpath=../..").inner_text()

    def approves(self, *, shot: str = "") -> None:
        self._shoot(shot)
        with self.page.expect_response(lambda answer: answer.request.method == "PATCH" and answer.ok):
            self.page.get_by_role("button", name="Approve").click()
        self._leave()

    def looks_at(self, run: RewindRun, task: str, words: str, *, shot: str = "") -> None:
        """Opens the page of a task and waits until its log shows these words."""
        self._open(f"dags/{DAG}/runs/{quote(run.run_id, safe='')}/tasks/{task}")
        self.page.get_by_text(words).first.wait_for()
        self._shoot(shot)

    def _open(self, path: str) -> None:
        self.page.goto(f"{self.lab.airflow.url}/{path}")

    def _leave(self) -> None:
        """An open page of Airflow keeps a core busy while the test waits for a run."""
        self.page.goto("about:blank")

    @staticmethod
    def _section(dialog: Locator, name: str) -> Locator:
        dialog.get_by_role("button", name=name).click()
        content = dialog.locator(f"[id$=':content:{name}']")
        content.wait_for()
        return content

    def _shoot(self, name: str, height: int = HEIGHT) -> None:
        if self._shots and name:
            self.page.set_viewport_size({"width": WIDTH, "height": height})
            self.page.wait_for_timeout(1000)  # sections open and pages are redrawn gradually
            self.page.screenshot(path=Path(self._shots) / f"{name}.png")
            self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})


@pytest.fixture
def person(lab: Lab, browser: Browser) -> Iterator[Person]:
    """A person who is signed in as Airflow's admin."""
    with browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}) as context:
        context.add_cookies([{"name": "_token", "value": lab.client.token(), "url": lab.airflow.url}])
        context.set_default_timeout(60_000)
        yield Person(lab, context.new_page())


class Live:
    """A consumer that reads continuously, from two partitions. The number in each record is its offset."""

    PARTITIONS = (0, 1)

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.consumer: Consumer = lab.consumer("live", len(self.PARTITIONS))
        self.ends = dict.fromkeys(self.PARTITIONS, 0)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Records arrive as long as the block runs."""
        enough = threading.Event()

        def arrive() -> None:
            while not enough.wait(1):  # each arrival is a batch, and a batch is a Spark job
                for partition, end in self.ends.items():
                    self.consumer.produce(*range(end, end + 10), partition=partition)
                    self.ends[partition] += 10

        thread = threading.Thread(target=arrive)
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """The DAG is unpaused as long as the block runs; its first run starts by itself."""
        client = self.lab.client
        client.unpause(self.consumer.dag)
        try:
            yield
        finally:
            client.pause(self.consumer.dag)
            for run in client.runs(self.consumer.dag):
                client.mark("failed", self.consumer.dag, run["dag_run_id"], "consume")

    def positions(self) -> dict[int, int]:
        query = "SELECT partition, next_offset FROM tidemark.partition_offset JOIN tidemark.consumer_group USING (group_id) WHERE name = %s"
        return dict(self.lab.sql(query, self.consumer.name))

    def reached(self, ends: dict[int, int]) -> None:
        until(lambda: self.positions() and all(self.positions()[part] >= end for part, end in ends.items()), what=f"{ends} read")

    def rows(self, table: str = "", below: dict[int, int] | None = None) -> dict[int, list[tuple[Any, ...]]]:
        """All columns of the rows below these offsets, by partition."""
        found = self.lab.sql(f"SELECT * FROM {table or self.consumer.table} ORDER BY kafka_partition, kafka_offset, kafka_seq")
        limit = below or self.ends
        return {part: [row for row in found if row[2] == part and row[3] < limit[part]] for part in self.PARTITIONS}

    def moved(self, rewind_id: int) -> dict[int, tuple[int, int, int]]:
        """For each partition: its position when the plan was made, its position when the plan was applied, and the new one."""
        query = "SELECT partition, planned_offset, old_offset, new_offset FROM tidemark.rewind_partition WHERE rewind_id = %s"
        return {part: (planned, old, new) for part, planned, old, new in self.lab.sql(query, rewind_id)}


@pytest.mark.thorough
def test_person_rewinds_a_group_that_reads_sees_what_has_changed_and_undoes_it(lab: Lab, person: Person) -> None:
    """A factor is wrong for a while. The rewind is planned, approved and applied while records arrive and are read; nothing stops. Records
    that are read again get the right factor, and `verify` counts the changes. The undo restores every row, and each record that has arrived
    since is in the sink once."""
    live = Live(lab)
    with live.reading():
        with live.arriving():
            live.reached(dict.fromkeys(live.PARTITIONS, TARGET + 1))
            lab.set_factor(2)
            live.reached({part: end + WRONG for part, end in live.positions().items()})
            lab.set_factor(1)

            run = person.asks("live", "to-offset", str(TARGET), "the factor was wrong since noon", shot="rewind-form")
            plan = person.reads_the_plan(run)
            assert f"Continue at offset {TARGET} of each partition" in plan
            assert "Reason: the factor was wrong since noon" in plan
            first = run.stored()[4]
            kept = live.rows(below=dict.fromkeys(live.PARTITIONS, TARGET))
            person.approves(shot="rewind-plan")
            assert run.wait() == "success"
            assert run.stored() == ("APPLIED", "admin", "admin", "admin", first)
            assert run.tasks()["consume"] == "skipped"  # the consumer's run continues by itself
            moved = live.moved(first)
            assert all(planned < old and new == TARGET for planned, old, new in moved.values()), moved

            old = {part: was for part, (_, was, _) in moved.items()}
            (archive,) = lab.sql("SELECT relation FROM tidemark.rewind_archive WHERE rewind_id = %s", first)[0]
            archived = live.rows(archive, old)
            wrong = sum(row[0] != row[3] for rows in archived.values() for row in rows)
            assert wrong >= WRONG * len(live.PARTITIONS)
            equal = sum(was - TARGET for was in old.values()) - wrong
            assert run.xcom("verify") == {"live": {"equal": equal, "changed": wrong, "gone": 0, "new": 0}}
            assert all(row[0] == row[3] for rows in live.rows(below=old).values() for row in rows)
            person.looks_at(run, "verify", "offsets read again", shot="rewind-run")

            undo = person.asks("live", "undo", str(first), "it was the right factor after all")
            plan = person.reads_the_plan(undo)
            assert f"Rewind {undo.stored()[4]} (PLANNED): Undo rewind {first}" in plan
            person.approves()
            assert undo.wait() == "success"
            assert (undo.stored()[:4], run.stored()[0]) == (("APPLIED", "admin", "admin", "admin"), "UNDONE")
            assert {part: new for part, (_, _, new) in live.moved(undo.stored()[4]).items()} == old
            assert live.rows(below=old) == {part: kept[part] + archived[part] for part in live.PARTITIONS}
            events = [event.extra for event in lab.client.asset_events(live.consumer.table) if event.source_dag_id == DAG]
            assert [(event["rewind"], event["undo_of"]) for event in events] == [(first, None), (undo.stored()[4], first)]
            assert [[begin for ((begin, _),) in event["ranges"].values()] for event in events] == [[TARGET, TARGET]] * 2
            live.reached({part: end + 1 for part, end in live.ends.items()})
        live.reached(live.ends)
        assert live.positions() == live.ends
        assert [state for state, _, _ in live.consumer.attempts()] == ["RUNNING"], "it is still the first driver"
    assert {part: [row[3] for row in rows] for part, rows in live.rows().items()} == {
        part: [*range(end)] for part, end in live.ends.items()
    }


@pytest.mark.thorough
def test_page_follows_a_rewind_from_its_request_to_the_records_that_are_read_again(lab: Lab, person: Person) -> None:
    """The approval is a click away, and the way back leads to the progress. Of a plan that is refused, the page has the reason."""
    followed = lab.consumer("followed")
    followed.produce(*range(10))
    followed.read_here()
    lab.client.unpause(followed.dag)
    page = person.page

    def request(offset: int) -> None:
        page.goto(f"{lab.airflow.url}/plugin/tidemark/groups/followed/rewind?scenario=to-offset&value={offset}")
        page.locator("[name=reason]").fill("the factor was wrong since noon")
        page.get_by_role("button", name="Request the rewind …").click()
        page.get_by_role("button", name="Request the rewind", exact=True).click()

    request(4)
    page.get_by_role("link", name="Review and approve it").click()
    with page.expect_response(lambda answer: answer.request.method == "PATCH" and answer.ok):
        page.get_by_role("button", name="Approve").click()

    def back() -> bool:
        page.go_back()
        return "plugin/tidemark" in page.url

    until(back, what="back on the page")
    page.get_by_text("6 offsets read again").wait_for(timeout=180_000)
    assert followed.position() == 10

    page.route("**/rewind-preview?*", lambda route: route.abort())
    request(5000)
    page.get_by_text("target 5000 is after the end of the log").wait_for()
    page.goto("about:blank")
