"""Starts a driver and follows it through its attempt's row in Postgres, for the command line and the Airflow operator.

The driver has its own process group and never outlives the caller: it dies with the thread that started it, and is killed when the caller
stops following it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential

from tidemark import project
from tidemark.connections import Connections
from tidemark.db import Connection, DatabaseUrl, session, transaction
from tidemark.driver.applications import Application
from tidemark.driver.environment import driver_env, interpreter, require_tidemark, separate
from tidemark.driver.keeper_client import ForkedDriver, KeeperUnavailable, start_driver
from tidemark.driver.process import child_env
from tidemark.errors import Broken, DatabaseUnavailable, Fenced, Refused, TidemarkError, Unavailable
from tidemark.offsets import store
from tidemark.records.outcome import RecordCounts

POLL_S = 0.5
KILL_WAIT_S = 10
CLOSE_S = 2.0
SILENT_S = 30.0
"""How long Postgres may be silent before the log reports it."""
OUTCOME_WAIT_S = 60
"""How long to retry reading an attempt's outcome while the database is unavailable. A failover takes about as long."""


Driver = subprocess.Popen[str] | ForkedDriver
"""A driver's process. It leads a process group."""


@dataclass(frozen=True, slots=True)
class PartitionResult:
    """An attempt's result for a partition. ``start, end`` is the committed range; the run stops at ``planned_end``."""

    topic: str
    partition: int
    start: int
    end: int
    planned_end: int
    batches: int = 0
    loaded: int = 0
    skipped: int = 0
    retried: int = 0
    failed: int = 0
    unaccounted: int = 0
    sink_rows: int = 0
    deleted: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """A range that this attempt stored as lost. ``end`` is `None` if unknown."""

    topic: str
    partition: int
    start: int
    end: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class ClusterDriver:
    """A driver on a cluster, as its attempt's row and its database session show it. ``age_s`` is the attempt's."""

    application: Application
    started: bool
    alive: bool
    age_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """An attempt's stored state. ``state`` is RUNNING, COMMITTED or FAILED; ``planned`` is false until the run has stored its plan."""

    attempt_id: int
    state: str
    planned: bool
    partitions: tuple[PartitionResult, ...]
    lost: tuple[Lost, ...]
    driver: ClusterDriver | None = None

    @property
    def records(self) -> int:
        """Offsets committed so far."""
        return sum(part.end - part.start for part in self.partitions)

    @property
    def total(self) -> int:
        """Offsets committed once the run is done."""
        return sum(part.planned_end - part.start for part in self.partitions)

    @property
    def counts(self) -> dict[str, int]:
        """The sums of the partitions' counts, with the names of `RecordCounts`."""
        return {count.name: sum(getattr(part, count.name) for part in self.partitions) for count in fields(RecordCounts)}


class _AttemptEnded(TidemarkError):
    attempt_id: int
    type: str
    text: str

    def __str__(self) -> str:
        return self.text


class AttemptRefused(_AttemptEnded, Refused):
    """The driver found a problem that must be fixed first."""


class AttemptFenced(_AttemptEnded, Fenced):
    """A newer attempt owns the partitions."""


class AttemptUnavailable(_AttemptEnded, Unavailable):
    """The driver met an outage, or a transform error that may not occur again."""


class AttemptBroken(_AttemptEnded, Broken):
    """The driver found a broken invariant."""


class AttemptFailed(_AttemptEnded):
    """The driver failed with an unknown error."""

    retriable = True


class DriverNotSpawned(Unavailable):
    """The driver's process could not be started."""

    attempt_id: int
    cause: str

    def __str__(self) -> str:
        return f"The driver of attempt {self.attempt_id} could not be started: {self.cause}. It read nothing."


class DriverDied(Unavailable):
    """The driver ended without storing a result: it was killed or crashed."""

    attempt_id: int
    status: int

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with status {self.status}"
        return f"The driver of attempt {self.attempt_id} {how}. Its commits stay; the next attempt continues from there."


class AttemptGone(Unavailable):
    """The row of an existing attempt is missing."""

    attempt_id: int

    def __str__(self) -> str:
        return (
            f"The row of attempt {self.attempt_id} is gone: Postgres was restored, or failed over to a replica that lagged behind. "
            "Rows and offsets were restored together, so the next run reads the missing records again."
        )


@dataclass(frozen=True, slots=True)
class DriverArguments:
    """The command line of a driver (`spark_jobs/consume.py`) for an attempt whose row exists. ``consumers``: `None` for the project's."""

    consumer: str
    attempt_id: int
    consumers: Path | None = None
    transforms: Sequence[Path] = ()
    partitions: Sequence[str] = ()
    drain: bool = False

    def command(self) -> list[str]:
        options = [("--consumers", self.consumers)] if self.consumers else []
        options += [("--transforms", folder) for folder in self.transforms]
        return [interpreter(), str(project.consume_job()), *self.words(), *(str(word) for option in options for word in option)]

    def words(self) -> list[str]:
        """The arguments without those that name folders of this machine."""
        partitions = [word for part in self.partitions for word in ("--partition", part)]
        return [self.consumer, "--attempt", str(self.attempt_id), *(["--drain"] if self.drain else []), *partitions]


def run_attempt(
    arguments: DriverArguments,
    connections: Connections,
    *,
    on_log: Callable[[str], None],
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_start: Callable[[Driver], None] = lambda driver: None,
    on_silence: Callable[[str], None] | None = None,
    with_keeper: bool = False,
) -> Progress:
    """Starts the driver of an attempt, follows it to its end and returns its result.

    ``on_log`` gets each line of the driver's output, ``on_progress`` the state twice a second, both in the caller's thread. ``on_start``
    gets the process, so that a signal handler can kill it. ``on_silence`` gets a line when Postgres stops answering and another when it
    answers again (default: ``on_log``). ``with_keeper``: a keeper forks the driver, if possible (`tidemark.driver.keeper_client`).
    The driver dies with the calling thread. The function follows it even while Postgres does not answer.
    Raises one of the ``Attempt...`` errors, `DriverNotSpawned`, `DriverDied`, or `BadInput` for an interpreter that cannot run drivers.
    """
    attempt_id = arguments.attempt_id
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with contextlib.closing(Follow(connections.database_url, attempt_id)) as follow:
        try:
            driver = _start(arguments, connections, on_log, with_keeper=with_keeper)
            assert driver.stdout is not None
            reader = threading.Thread(target=_forward_lines, args=(driver.stdout, lines), daemon=True)
            try:
                reader.start()
                on_start(driver)
                while not _has_ended(driver, POLL_S):
                    _drain(lines, on_log)
                    follow.show(on_progress, on_silence or on_log)
                reader.join(KILL_WAIT_S)
                _drain(lines, on_log)
            finally:
                kill(driver)
        except BaseException as error:  # also a timeout or Ctrl-C: the caller stops following the driver
            abandon(connections.database_url, attempt_id, error)
            raise
    return outcome(connections.database_url, attempt_id, DriverDied(attempt_id=attempt_id, status=driver.wait()))


def _start(arguments: DriverArguments, connections: Connections, on_log: Callable[[str], None], *, with_keeper: bool) -> Driver:
    command = arguments.command()
    env = child_env(driver_env({**os.environ, **connections.env()}))
    try:
        return _start_with_keeper(command, env, on_log) if with_keeper else _spawn(command, env)
    except OSError as error:
        raise DriverNotSpawned(attempt_id=arguments.attempt_id, cause=str(error)) from error


def _spawn(command: Sequence[str], env: Mapping[str, str]) -> Driver:
    if separate():
        require_tidemark()
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _start_with_keeper(command: Sequence[str], env: Mapping[str, str], on_log: Callable[[str], None]) -> Driver:
    try:
        return start_driver(command[1:], env)
    except KeeperUnavailable as error:
        on_log(f"no keeper, starting the driver without one: {error}")
        return _spawn(command, env)


def kill(driver: Driver) -> None:
    """Kills the driver's process group, and waits up to `KILL_WAIT_S` for the driver's end: it may hang in the kernel."""
    kill_group(driver)
    _has_ended(driver, KILL_WAIT_S)


def kill_group(driver: Driver) -> None:
    """Only sends SIGKILL. Safe in a signal handler, where the main thread may already be waiting for the driver.

    It writes no output: after the supervisor's death a write may raise.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)


def progress(database_url: DatabaseUrl, attempt_id: int) -> Progress:
    """An attempt's current state."""
    with session(database_url) as connection, transaction(connection) as cur:
        return _progress(cur, attempt_id)[0]


class Follow:
    """Polls an attempt's state in its own thread and session, so that the caller never waits for a silent Postgres.

    Leaves it to the driver to report an unavailable database.
    """

    def __init__(self, database_url: DatabaseUrl, attempt_id: int) -> None:
        self._url = database_url
        self._attempt_id = attempt_id
        self._updates: queue.SimpleQueue[Progress] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._answered, self._answered_at = time.monotonic(), datetime.now(UTC)
        self._silent = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name=f"follow {attempt_id}", daemon=True)
        self._thread.start()

    def show(self, on_progress: Callable[[Progress], None], on_log: Callable[[str], None]) -> Progress | None:
        """Passes on the latest state since the last call, and returns it. Reports once if Postgres was silent for `SILENT_S`. Raises
        `AttemptGone`."""
        if self._error is not None:
            raise self._error
        latest = None
        with contextlib.suppress(queue.Empty):
            while True:
                latest = self._updates.get_nowait()
        if latest is not None:
            on_progress(latest)
        silent = time.monotonic() - self._answered >= SILENT_S
        if silent and not self._silent:
            on_log(f"no answer from Postgres since {self._answered_at:%H:%M:%S} UTC attempt={self._attempt_id}")
        elif self._silent and not silent:
            on_log(f"Postgres answers again attempt={self._attempt_id}")
        self._silent = silent
        return latest

    def close(self) -> None:
        """Returns within `CLOSE_S`. A thread that still waits for Postgres ends with its session, see `tidemark.db.CLIENT_DEFAULTS`."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _poll(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                with session(self._url, application=f"tidemark follow {self._attempt_id}") as connection:
                    self._poll_session(connection)
            except DatabaseUnavailable:
                continue
            except Exception as error:  # noqa: BLE001 - `show` raises it in the caller's thread
                self._error = error
                return

    def _poll_session(self, connection: Connection) -> None:
        while not self._closing.wait(POLL_S):
            with transaction(connection) as cur:
                state, _ = _progress(cur, self._attempt_id)
            self._answered, self._answered_at = time.monotonic(), datetime.now(UTC)
            self._updates.put(state)


def _has_ended(driver: Driver, seconds: float) -> bool:
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


@retry(
    retry=retry_if_exception_type(DatabaseUnavailable),
    stop=stop_after_delay(OUTCOME_WAIT_S),
    wait=wait_exponential(multiplier=0.5, max=5),
    reraise=True,
)
def outcome(database_url: DatabaseUrl, attempt_id: int, died: TidemarkError) -> Progress:
    """The result of an attempt whose driver has ended. ``died`` becomes its error if it has neither result nor error.

    Raises one of the ``Attempt...`` errors, or ``died``.
    """
    with session(database_url) as connection, transaction(connection) as cur:
        result, error = _progress(cur, attempt_id)
        if result.state == "RUNNING":
            store.end_attempt(cur, attempt_id, {"kind": "unavailable", "type": type(died).__name__, "text": str(died)})
        elif result.state == "COMMITTED":
            return result
    if error is None:
        raise died
    kinds = {"refused": AttemptRefused, "fenced": AttemptFenced, "unavailable": AttemptUnavailable, "broken": AttemptBroken}
    raise kinds.get(error["kind"], AttemptFailed)(attempt_id=attempt_id, type=error["type"], text=error["text"])


def abandon(database_url: DatabaseUrl, attempt_id: int, error: BaseException) -> None:
    """Ends the row of an attempt whose caller stopped following its driver, or could not start it."""
    text = str(error) if isinstance(error, TidemarkError) else f"The driver was killed: {error or type(error).__name__}"
    kind = "refused" if isinstance(error, Refused) else "unavailable"
    failure = {"kind": kind, "type": type(error).__name__, "text": text}
    with contextlib.suppress(TidemarkError), session(database_url) as connection, transaction(connection) as cur:
        store.end_attempt(cur, attempt_id, failure)


def _progress(cur: Any, attempt_id: int) -> tuple[Progress, Mapping[str, str] | None]:
    row = store.read_attempt(cur, attempt_id)
    if row is None:
        raise AttemptGone(attempt_id=attempt_id)
    committed = {(part["topic"], part["partition"]): part for part in store.attempt_ledger(cur, attempt_id)}
    parts = []
    for planned in row["planned"] or []:
        key = {"topic": planned["topic"], "partition": planned["partition"], "planned_end": planned["end"]}
        ledger = committed.get((planned["topic"], planned["partition"]))
        parts.append(PartitionResult(**{"start": planned["start"], "end": planned["start"], **(ledger or {}), **key}))
    lost = tuple(Lost(**gap) for gap in store.attempt_lost(cur, attempt_id))
    driver = _cluster_driver(row)
    return Progress(attempt_id, row["state"], row["planned"] is not None, tuple(parts), lost, driver), row["error"]


def _cluster_driver(row: Mapping[str, Any]) -> ClusterDriver | None:
    if (stored := row["application"]) is None:
        return None
    application = Application(**{fact.name: stored.get(fact.name) for fact in fields(Application)})
    return ClusterDriver(application, "driver_at" in stored, row["driver_alive"], row["age_s"])


def _forward_lines(pipe: IO[str], destination: queue.SimpleQueue[str]) -> None:
    """Ends, and closes the pipe, when the last process that holds its other end has ended. That may be long after the driver's end, so that
    no other thread may close it: `close` waits for the read."""
    with pipe:
        for line in pipe:
            destination.put(line.rstrip("\n"))


def _drain(lines: queue.SimpleQueue[str], on_log: Callable[[str], None]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            on_log(lines.get_nowait())
