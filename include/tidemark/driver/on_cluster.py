"""Runs attempts whose driver is on a cluster: submits the driver, and follows it through its attempt's row.

The row is the handle. The driver stores its start and its result there, and its database session shows that it lives. A process that
follows it may end, and another one may follow it instead (`attempt_to_follow`). The cluster manager is asked only while the driver has no
session.

    submitted ──▶ waits in a queue ──▶ driver has a session ──▶ result in the row
                      │ longer than START_LIMIT    │ session gone, and the application too, or silent for SILENT_LIMIT
                      └────────────┬───────────────┘
                                   ▼
                 the attempt ends as unavailable, and what is left of the application is killed
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from tidemark.connections import Connections
from tidemark.db import DatabaseUrl, session, transaction
from tidemark.driver import applications
from tidemark.driver.applications import Application, ClusterUnavailable, Report, Stage
from tidemark.driver.launch import POLL_S, ClusterDriver, DriverArguments, Follow, Progress, abandon, outcome, progress
from tidemark.driver.submission import ClusterSettings, new_application, submit
from tidemark.errors import TidemarkError, Unavailable
from tidemark.offsets import store
from tidemark.offsets.store import TaskIdentity
from tidemark.text.duration import format_duration

FIRST_LOOK_S, LONGEST_LOOK_S = 10.0, 60.0
"""When the cluster manager is asked about a driver without a session for the first time; the pause doubles, up to the second value."""
SILENT_LIMIT = timedelta(minutes=5)
"""How long a driver that has started may have no session while its application runs, or while the cluster manager does not answer."""


class _DriverLost(Unavailable):
    attempt_id: int
    application: str
    why: str


class DriverEnded(_DriverLost):
    """The application ended, and its driver has stored no result."""

    def __str__(self) -> str:
        return (
            f"The driver of attempt {self.attempt_id} ended without a result: application {self.application}: {self.why}. "
            "Its commits stay; the next attempt continues from there."
        )


class DriverNotStarted(_DriverLost):
    """The application was submitted, and its driver did not start in time."""

    limit: str

    def __str__(self) -> str:
        return (
            f"The driver of attempt {self.attempt_id} did not start within {self.limit} and was killed: application {self.application}: "
            f"{self.why}. It read nothing. Free its queue, or allow a longer wait with the Spark setting spark.tidemark.startLimit."
        )


class DriverSilent(_DriverLost):
    """The driver has started, and has had no database session for `SILENT_LIMIT`."""

    def __str__(self) -> str:
        return (
            f"The driver of attempt {self.attempt_id} has had no session on Postgres for {format_duration(SILENT_LIMIT)} and was killed: "
            f"application {self.application}: {self.why}. Its commits stay; the next attempt continues from there."
        )


class DriverStopped(Unavailable):
    """The caller wanted the driver to end."""

    attempt_id: int

    def __str__(self) -> str:
        return f"The driver of attempt {self.attempt_id} was stopped. Its commits stay; the next attempt continues from there."


def start(
    arguments: DriverArguments,
    connections: Connections,
    settings: ClusterSettings,
    *,
    on_log: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Submits the driver of an attempt whose row exists.

    A submission that fails ends the attempt. Raises `SubmissionFailed`, and `SubmissionStopped` once ``stopped`` returns True.
    """
    attempt_id, url = arguments.attempt_id, connections.database_url
    application = new_application(settings, arguments.consumer, attempt_id)
    try:
        _note(url, attempt_id, application)
    except BaseException as error:
        abandon(url, attempt_id, error)
        raise
    try:
        title = f"tidemark {arguments.consumer} attempt {attempt_id}"
        application = submit(application, settings, connections, arguments.words(), title, stopped)
        _note(url, attempt_id, application)
    except BaseException as error:
        abandon(url, attempt_id, error)
        with contextlib.suppress(ClusterUnavailable):
            applications.kill(application)
        raise
    on_log(f"driver submitted attempt={attempt_id} application={application.shown}")


def follow(
    attempt_id: int,
    connections: Connections,
    start_limit: timedelta,
    *,
    on_log: Callable[[str], None],
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[Application], None] = lambda application: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Progress:
    """Follows the driver of an attempt to its end and returns its result. Follows it even while Postgres does not answer.

    `tidemark.driver.launch.run_attempt` describes ``on_log`` and ``on_progress``. ``on_start`` gets the application, so that a signal
    handler can kill it. If the caller stops (a timeout, Ctrl-C, or ``stopped`` returns True), the driver is killed. Raises one of the
    ``Attempt...`` errors, or one of this module's.
    """
    url, application = connections.database_url, None
    unseen_since, look_after_s = time.monotonic(), FIRST_LOOK_S
    problem: TidemarkError | None = None
    with contextlib.closing(Follow(url, attempt_id)) as following:
        try:
            while problem is None:
                time.sleep(POLL_S)
                if stopped():
                    raise DriverStopped(attempt_id=attempt_id)
                latest = following.show(on_progress, on_log)
                if latest is None:
                    continue
                if latest.state != "RUNNING" or latest.driver is None:
                    break
                if application is None:
                    on_start(latest.driver.application)
                application, unseen_s = latest.driver.application, time.monotonic() - unseen_since
                if latest.driver.alive:
                    unseen_since, look_after_s = time.monotonic(), FIRST_LOOK_S
                elif unseen_s >= look_after_s:
                    look_after_s = next_look_s(look_after_s)
                    problem = examine(attempt_id, latest.driver, unseen_s, start_limit, on_log)
        except BaseException as error:
            stop(url, attempt_id, error, application)
            raise
    return outcome(url, attempt_id, problem or DriverStopped(attempt_id=attempt_id))


def examine(
    attempt_id: int, driver: ClusterDriver, unseen_s: float, start_limit: timedelta, on_log: Callable[[str], None]
) -> TidemarkError | None:
    """Asks the cluster manager about a driver that has had no session for ``unseen_s``. Returns the error with which its attempt has to
    end, after killing what is left of the application; `None`: go on waiting."""
    try:
        report = applications.report(driver.application)
    except ClusterUnavailable as error:
        report = Report(Stage.RUNNING, str(error))
    problem = judge(attempt_id, driver, report, unseen_s, start_limit)
    if problem is None:
        on_log(f"driver has no session attempt={attempt_id} application={report.stage} {report.why}".rstrip())
    elif report.stage is not Stage.GONE:  # one that has ended may have left the files of its submission
        kill(driver.application, on_log)
    return problem


def judge(attempt_id: int, driver: ClusterDriver, report: Report, unseen_s: float, start_limit: timedelta) -> TidemarkError | None:
    """The error of an attempt whose driver has no session; `None`: go on waiting."""
    why = report.why or ("the cluster manager does not know it any more" if report.stage is Stage.GONE else report.stage)
    facts: dict[str, Any] = {"attempt_id": attempt_id, "application": driver.application.shown, "why": why}
    if report.stage in (Stage.ENDED, Stage.GONE):
        return DriverEnded(**facts)
    if not driver.started:
        return DriverNotStarted(**facts, limit=format_duration(start_limit)) if driver.age_s >= start_limit.total_seconds() else None
    return DriverSilent(**facts) if unseen_s >= SILENT_LIMIT.total_seconds() else None


def next_look_s(look_after_s: float) -> float:
    """How long a driver has had no session at the next look, after one at ``look_after_s``."""
    return look_after_s + min(look_after_s, LONGEST_LOOK_S)


def attempt_to_follow(
    connections: Connections, group: str, task: TaskIdentity, on_log: Callable[[str], None], *, of_rewind: int | None = None
) -> int | None:
    """The group's attempt of an earlier try of this task whose driver still runs on the cluster, or waits there. Raises
    `ClusterUnavailable`."""
    url = connections.database_url
    with session(url) as connection, transaction(connection) as cur:
        attempt_id = store.running_application(cur, group, task, of_rewind=of_rewind)
    if attempt_id is None or (driver := progress(url, attempt_id).driver) is None:
        return None
    if not driver.alive:
        application = driver.application
        if (application_id := applications.find(application)) is None:
            on_log(f"an earlier try's driver is gone attempt={attempt_id} application={application.shown}")
            return None
        if application.id is None:  # the try ended before the submission had reported it
            _note(url, attempt_id, replace(application, id=application_id))
    on_log(f"the driver of an earlier try still runs, following it attempt={attempt_id} application={driver.application.shown}")
    return attempt_id


def kill(application: Application, on_log: Callable[[str], None]) -> None:
    """Kills an application if the cluster manager answers. Otherwise its driver ends before its next batch, because its attempt has
    ended."""
    try:
        applications.kill(application)
    except ClusterUnavailable as error:
        on_log(f"the application could not be killed; its driver ends before its next batch application={application.shown}: {error}")


def stop(url: DatabaseUrl, attempt_id: int, error: BaseException, application: Application | None = None) -> None:
    """Ends an attempt with this error, and kills its driver. A driver that cannot be killed ends before its next batch."""
    abandon(url, attempt_id, error)
    if application is None:
        with contextlib.suppress(TidemarkError):
            if driver := progress(url, attempt_id).driver:
                application = driver.application
    if application is not None:
        kill(application, lambda text: None)


def _note(url: DatabaseUrl, attempt_id: int, application: Application) -> None:
    with session(url) as connection, transaction(connection) as cur:
        store.note_application(cur, attempt_id, asdict(application))
