"""The faults of a seed: which fault, on which consumer, at which step of a commit, after what wait. Pure: equal seeds give equal faults."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tidemark.sink.steps import Step


class Fault(StrEnum):
    KILL_DRIVER = "kill-driver"
    """SIGKILL of the driver; its JVM and its workers have to notice it."""
    KILL_JVM = "kill-jvm"
    KILL_WORKER = "kill-worker"
    """SIGKILL of the process that waits at a step of a commit: a Python worker, or the driver in a staged commit."""
    STOP_DRIVER = "stop-driver"
    """SIGSTOP, then a newer attempt, then SIGCONT, for the driver alone or with its JVM and workers."""
    TWIN_ATTEMPTS = "twin-attempts"
    """A second attempt while the first is running: the next try of the same task, or another run of it."""
    TERMINATE_BACKEND = "terminate-backend"
    """``pg_terminate_backend`` for the sessions in which an attempt commits."""
    CRASH_POSTGRES = "crash-postgres"
    """Postgres is stopped in immediate mode and started again."""
    KILL_BROKER = "kill-broker"
    """SIGKILL of the broker, which is then started again."""
    HUNG_TRANSACTION = "hung-transaction"
    """A producer is killed with its transaction open. The transaction stays open until its timeout."""
    KILL_COMMITTING = "kill-committing-producer"
    """A producer is killed after it has requested the commit, whose outcome is unknown."""


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
"""Steps at which the session's transaction is open, or opens with the next statement."""
ALWAYS_AT_A_STEP = {Fault.KILL_WORKER: tuple(Step), Fault.TERMINATE_BACKEND: IN_TRANSACTION}


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned fault, ``after_s`` after the previous one.

    ``step`` is where a commit of ``consumer`` is stopped first; None means any moment. ``pause_s`` is how long the target stays stopped.
    ``coin`` chooses between the two variants of a fault.
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
    """An endless sequence of faults, ``every_s`` apart on average. Each kind occurs once before any is repeated, in a new order each time.

    Faults on consumers hit the consumers in turn, starting with a random one, so that none is spared.
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
