"""The faults of a seed: which, against whom, at which step of a commit, after what wait. Pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemark.sink.steps import Step


class Fault(StrEnum):
    KILL_DRIVER = "kill-driver"
    """SIGKILL of the driver; its JVM and its workers find out by themselves."""
    KILL_JVM = "kill-jvm"
    KILL_WORKER = "kill-worker"
    """SIGKILL of the process that stands at a step of a commit: a Python worker, in a staged commit the driver."""
    STOP_DRIVER = "stop-driver"
    """SIGSTOP, a newer attempt, SIGCONT: of the driver alone, or with its JVM and workers."""
    TWIN_ATTEMPTS = "twin-attempts"
    """A second attempt while the first is at work: the next try of the same task, or another run of it."""
    TERMINATE_BACKEND = "terminate-backend"
    """``pg_terminate_backend`` of the sessions in which an attempt commits."""
    CRASH_POSTGRES = "crash-postgres"
    """Postgres stopped in mode immediate, and started again."""
    KILL_BROKER = "kill-broker"
    """SIGKILL of the broker, and a start."""
    HUNG_TRANSACTION = "hung-transaction"
    """A producer killed with its transaction open; nobody ends that before its time-out."""
    KILL_COMMITTING = "kill-committing-producer"
    """A producer killed when it has asked for the commit: what became of it is not known."""


PAUSE_LIMIT_S = 3.0

ON_CONSUMERS = (
    Fault.KILL_DRIVER,
    Fault.KILL_JVM,
    Fault.KILL_WORKER,
    Fault.STOP_DRIVER,
    Fault.TWIN_ATTEMPTS,
    Fault.TERMINATE_BACKEND,
)
IN_TRANSACTION = (Step.MOVE_OFFSET, Step.COPY_ROWS, Step.COPY_FAILED, Step.LEDGER, Step.COMMIT)
"""Steps before which the session's transaction is open, or opens with the first word."""
ALWAYS_AT_A_STEP = {Fault.KILL_WORKER: tuple(Step), Fault.TERMINATE_BACKEND: IN_TRANSACTION}


@dataclass(frozen=True, slots=True)
class Planned:
    """A fault to come, ``after_s`` behind the one before.

    ``step`` is where a commit of ``consumer`` is stopped first, None to strike at any moment. ``pause_s`` is how long what was stopped
    stays so. ``coin`` decides between the two ways a fault has.
    """

    number: int
    fault: Fault
    after_s: float
    consumer: str
    step: Step | None
    pause_s: float
    coin: bool

    def __str__(self) -> str:
        where = "any moment" if self.step is None else f"step {self.step.value} {self.step.name}"
        return f"fault {self.number} {self.fault} consumer={self.consumer} at={where} pause_s={self.pause_s:.1f} coin={self.coin}"


def faults(seed: int, consumers: Sequence[str], every_s: float, kinds: Sequence[Fault] = tuple(Fault)) -> Iterator[Planned]:
    """Faults without end, one ``every_s`` on average. Each kind comes once before any comes again, in an order of its own each time.

    The faults on consumers go round the consumers in turn, beginning with any, so that none is spared.
    """
    random_ = random.Random(f"{seed}/faults")
    number = 0
    turn = random_.randrange(len(consumers))
    while True:
        for fault in random_.sample(kinds, len(kinds)):
            number += 1
            turn += fault in ON_CONSUMERS
            steps: tuple[Step | None, ...] = ALWAYS_AT_A_STEP.get(fault, (*Step, None, None))
            yield Planned(
                number,
                fault,
                after_s=random_.uniform(0.5, 1.5) * every_s,
                consumer=consumers[turn % len(consumers)],
                step=random_.choice(steps),
                pause_s=random_.uniform(0.0, PAUSE_LIMIT_S),
                coin=random_.random() < 0.5,
            )
