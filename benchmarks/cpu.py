"""CPU seconds by family of process: broker, JVM, Python, Postgres, and the rest of the machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

FAMILIES = ("broker", "JVM", "Python", "Postgres")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """CPU seconds up to now."""

    at: float
    by_family: dict[str, float]
    machine: float

    def since(self, earlier: Snapshot) -> Used:
        used = {family: max(0.0, self.by_family[family] - earlier.by_family[family]) for family in FAMILIES}
        elsewhere = max(0.0, self.machine - earlier.machine - sum(used.values()))
        return Used(self.at - earlier.at, used, elsewhere)


@dataclass(frozen=True, slots=True)
class Used:
    """CPU seconds of an interval. ``elsewhere``: of other processes, and of the kernel's own threads."""

    seconds: float
    by_family: dict[str, float]
    elsewhere: float

    def share_elsewhere(self, cores: int) -> float:
        return self.elsewhere / (self.seconds * cores) if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Meter:
    """Reads the CPU clocks of the servers, of one seat, and of all its descendants."""

    broker_pid: int
    postgres_pid: int
    seat_pids: tuple[int, ...]

    def read(self) -> Snapshot:
        """The time of a process that has ended counts for its parent after the parent has waited for it: the postmaster for a backend, the
        daemon for a Python worker. So processes that end between two readings are counted."""
        used = dict.fromkeys(FAMILIES, 0.0)
        used["broker"] = sum(seconds_of(one, ended=True) for one in tree([self.broker_pid]))
        used["Postgres"] = sum(seconds_of(one, ended=True) for one in tree([self.postgres_pid]))
        for one in tree(self.seat_pids):
            with contextlib.suppress(psutil.Error):
                java = one.name() == "java"
                used["JVM" if java else "Python"] += seconds_of(one, ended=False)
                used["Python"] += seconds_of(one, ended=True) - seconds_of(one, ended=False)  # the children of a JVM are Python workers
        busy = psutil.cpu_times()
        machine = busy.user + busy.nice + busy.system + getattr(busy, "irq", 0.0) + getattr(busy, "softirq", 0.0)
        return Snapshot(time.monotonic(), used, machine)


def tree(roots: Iterable[int]) -> list[psutil.Process]:
    found = []
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found += [root, *root.children(recursive=True)]
    return found


def seconds_of(process: psutil.Process, *, ended: bool) -> float:
    """User and system seconds of a process. With ``ended``, those of its ended children as well."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + ((times.children_user + times.children_system) if ended else 0.0)
