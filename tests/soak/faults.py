"""Injects the planned faults, each in a separate thread, and counts those that happened."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import psycopg2

from tests.soak.consumers import Attempt, Consumer
from tests.soak.plan import PAUSE_LIMIT_S, Fault, Planned
from tests.soak.producers import Setting, end_transaction, live_and_die
from tests.soak.watch import opened
from tidemark.local import LocalStack
from tidemark.sink.steps import Step

POLL_S = 0.02
AT_ONCE = 4
"""The maximum number of faults in progress at the same time; others wait."""
PROGRESS_BATCHES = 2
STRIKE_LIMIT_S = 45.0
"""How long a fault waits for a commit to reach its step. A fault on a server waits for a shorter time, and then happens without it."""
SERVER_LIMIT_S = 5.0
MARKERS_S = 1.0
"""The broker acknowledges the end of a transaction before it has written the markers."""
TAKEOVER_FACTOR = 5
TAKEOVER_LIMIT_S = 90.0
"""Half of the stopped drivers resume after this multiple of their pause, the others after the limit, or when the newer attempt ends."""

_TERMINATE = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE %s"


@dataclass(frozen=True, slots=True)
class Held:
    """A running attempt. The file ``order`` exists while one of its processes waits at a step of a commit."""

    attempt: Attempt
    order: Path | None

    def target(self, fault: Fault) -> psutil.Process | None:
        """The process to kill; for a worker, it is the one that waits at the step."""
        if fault is Fault.KILL_WORKER:
            return None if self.order is None else psutil.Process(int(self.order.suffix[1:]))
        return self.attempt.jvm() if fault is Fault.KILL_JVM else next(iter(self.attempt.tree()), None)

    def release(self) -> None:
        if self.order is not None:
            self.order.unlink(missing_ok=True)


@dataclass
class Injector:
    """Injects faults until ``over`` is set. Then waiting faults are given up, stopped processes resume, and stopped servers start.

    Between two faults it waits, for at most ``patience_s``, until ``batches`` shows that some batches were committed. Otherwise, on a slow
    machine, faults would only hit drivers that are still starting.
    """

    stack: LocalStack
    consumers: Mapping[str, Consumer]
    setting: Setting
    pool: ThreadPoolExecutor
    over: threading.Event
    say: Callable[[str], None]
    batches: Callable[[], int]
    patience_s: float
    happened: Counter[Fault] = field(default_factory=Counter)
    missed: Counter[Fault] = field(default_factory=Counter)
    """Planned faults that did not happen: the soak was over, or their target was gone."""
    at_step: Counter[str] = field(default_factory=Counter)
    begun: list[Future[bool]] = field(default_factory=list)
    """Attempts that faults have started in addition to the consumers' own."""
    _servers: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _suspended: list[psutil.Process] = field(default_factory=list)
    _doomed: list[tuple[float, str]] = field(default_factory=list)

    def run(self, planned: Iterable[Planned]) -> None:
        """Starts each fault at its time until ``over`` is set, and returns when all have ended. Raises the error of a fault that failed."""
        under_way: list[Future[None]] = []
        for one in planned:
            if self.over.wait(one.after_s):
                break
            enough, deadline = self.batches() + PROGRESS_BATCHES, time.monotonic() + self.patience_s
            while self.batches() < enough and time.monotonic() < deadline and not self.over.wait(POLL_S):
                pass
            while sum(not strike.done() for strike in under_way) >= AT_ONCE and not self.over.wait(POLL_S):
                pass
            under_way.append(self.pool.submit(self._strike, one))
            for strike in [strike for strike in under_way if strike.done()]:
                strike.result()
                under_way.remove(strike)
        for strike in under_way:
            strike.result()

    def resume_all(self) -> None:
        """Resumes all stopped processes."""
        with self._lock:
            for process in self._suspended:
                with contextlib.suppress(psutil.Error):
                    process.resume()
            self._suspended.clear()

    def end_transactions(self, younger_s: float) -> None:
        """Ends transactions that doomed producers left open in the last ``younger_s``; the broker's timeout has ended the older ones."""
        now = time.monotonic()
        for since, transactional_id in self._doomed:
            if now - since < younger_s:
                end_transaction(self.setting, transactional_id)

    def _strike(self, planned: Planned) -> None:
        self.say(str(planned))
        strike: Callable[[Planned], str | None] = {
            Fault.KILL_DRIVER: self._kill,
            Fault.KILL_JVM: self._kill,
            Fault.KILL_WORKER: self._kill,
            Fault.STOP_DRIVER: self._stop_driver,
            Fault.TWIN_ATTEMPTS: self._twin,
            Fault.TERMINATE_BACKEND: self._terminate,
            Fault.CRASH_POSTGRES: self._crash_postgres,
            Fault.KILL_BROKER: self._kill_broker,
            Fault.HUNG_TRANSACTION: self._doom,
            Fault.KILL_COMMITTING: self._doom,
        }[planned.fault]
        done = strike(planned)
        with self._lock:
            (self.missed if done is None else self.happened)[planned.fault] += 1
        self.say(f"fault {planned.number} {'came to nothing' if done is None else 'struck: ' + done}")

    # ---- targets

    @contextlib.contextmanager
    def _held(self, planned: Planned, limit_s: float = STRIKE_LIMIT_S) -> Iterator[Held | None]:
        """A running attempt of the consumer, with a commit waiting at the planned step, if any. None if there was none in time."""
        held = self._catch(self.consumers[planned.consumer], planned.step, time.monotonic() + limit_s)
        try:
            yield held
            if held is not None and held.order is not None and planned.step is not None:
                with self._lock:
                    self.at_step[planned.step.name] += 1
        finally:
            if held is not None:
                held.release()

    def _catch(self, consumer: Consumer, step: Step | None, deadline: float) -> Held | None:
        while time.monotonic() < deadline and not self.over.wait(POLL_S):
            attempt = next((attempt for attempt in consumer.live() if attempt.jvm() is not None), None)
            if attempt is None:
                continue
            if step is None:
                return Held(attempt, None)
            order = attempt.order(step)
            while time.monotonic() < deadline and not attempt.ended.is_set() and not self.over.wait(POLL_S):
                if (taken := attempt.held(step)) is not None:
                    return Held(attempt, taken)
            order.unlink(missing_ok=True)
            if (taken := attempt.held(step)) is not None:  # taken at the last moment
                taken.unlink(missing_ok=True)
        return None

    # ---- processes

    def _kill(self, planned: Planned) -> str | None:
        """With ``coin``, the process at the step waits there for the pause, and then continues if it is still alive."""
        with self._held(planned) as held, contextlib.suppress(psutil.NoSuchProcess):
            if held is None or (process := held.target(planned.fault)) is None:
                return None
            name = process.name()
            process.send_signal(signal.SIGKILL)
            if planned.coin:
                self.over.wait(planned.pause_s)
            return f"killed {name} pid={process.pid} attempt={held.attempt.attempt_id}"
        return None

    def _stop_driver(self, planned: Planned) -> str | None:
        consumer = self.consumers[planned.consumer]
        with self._held(planned) as held:
            tree = held.attempt.tree() if held else []
            if held is None or not tree:
                return None
            stopped = tree if planned.coin else tree[:1]
            with self._lock:
                self._suspended += stopped
            try:
                for process in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
                held.release()
                newer = self._begin(consumer, another_run=False)
                short = planned.pause_s < PAUSE_LIMIT_S / 2
                deadline = time.monotonic() + (planned.pause_s * TAKEOVER_FACTOR if short else TAKEOVER_LIMIT_S)
                while not newer.done() and time.monotonic() < deadline and not self.over.wait(POLL_S):
                    pass
                ended = "had ended" if newer.done() else "was at work"
            finally:
                for process in stopped:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
                with self._lock:
                    self._suspended = [process for process in self._suspended if process not in stopped]
        return f"stopped {len(stopped)} processes attempt={held.attempt.attempt_id}, which woke up when a newer one {ended}"

    def _twin(self, planned: Planned) -> str | None:
        consumer = self.consumers[planned.consumer]
        with self._held(planned) as held:
            if held is None:
                return None
            self._begin(consumer, another_run=planned.coin)
            self.over.wait(planned.pause_s)
        return f"began an attempt beside attempt={held.attempt.attempt_id}"

    def _begin(self, consumer: Consumer, *, another_run: bool) -> Future[bool]:
        future = self.pool.submit(consumer.attempt, another_run=another_run)
        with self._lock:
            self.begun.append(future)
        return future

    # ---- Postgres and Kafka

    def _terminate(self, planned: Planned) -> str | None:
        """With ``coin``, the commit is released first, so that the two race."""
        with self._held(planned) as held:
            if held is None:
                return None
            with (
                contextlib.suppress(psycopg2.OperationalError),
                opened(self.stack.postgres.url()) as connection,
                connection.cursor() as cursor,
            ):
                if planned.coin:
                    held.release()
                cursor.execute(_TERMINATE, (f"tidemark/%/{held.attempt.attempt_id}",))
                ((ended,),) = cursor.fetchall()
                return f"terminated {ended} sessions attempt={held.attempt.attempt_id}" if ended else None
            return None

    def _crash_postgres(self, planned: Planned) -> str | None:
        with self._held(planned, SERVER_LIMIT_S) as held, self._servers:
            if self.over.is_set():
                return None
            self.stack.stop_postgres_immediately()
            if held is not None:
                held.release()
            try:
                self.over.wait(planned.pause_s)
            finally:
                self.stack.start(self.stack.postgres)
        return f"Postgres was away for {planned.pause_s:.1f} s"

    def _kill_broker(self, planned: Planned) -> str | None:
        with self._held(planned, SERVER_LIMIT_S) as held, self._servers:
            with self.setting.ending:
                if self.over.wait(MARKERS_S):
                    return None
                self.stack.kill(self.stack.kafka)
            if held is not None:
                held.release()
            try:
                self.over.wait(planned.pause_s)
            finally:
                self.stack.start(self.stack.kafka)
        return f"Kafka was away for {planned.pause_s:.1f} s and its start"

    # ---- producers

    def _doom(self, planned: Planned) -> str | None:
        transactional_id, commit = f"doomed-{uuid.uuid4().hex[:8]}", planned.fault is Fault.KILL_COMMITTING
        chance = random.Random(f"{self.setting.seed}/doomed/{planned.number}")
        sent = live_and_die(self.setting, chance, transactional_id, commit=commit, stop=self.over, pause_s=planned.pause_s)
        with self._lock:
            self._doomed.append((time.monotonic(), transactional_id))
        return None if sent is None else f"killed a producer that had sent {sent} records"
