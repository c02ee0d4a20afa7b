"""CPU seconds by family of process (broker, JVM, Python, Postgres, and the rest of the machine), memory, and what repeats meanwhile."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

FAMILIES = ("broker", "JVM", "Python", "Postgres")
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Clocks:
    """CPU seconds, by family of processes and of the whole machine: up to a moment, or of an interval."""

    at: float
    by_family: dict[str, float]
    machine: float

    def since(self, earlier: Clocks) -> Clocks:
        used = {family: max(0.0, self.by_family[family] - earlier.by_family[family]) for family in FAMILIES}
        return Clocks(self.at - earlier.at, used, self.machine - earlier.machine)

    def share_elsewhere(self, cores: int) -> float:
        """Of an interval: the share of other processes, and of the kernel's own threads."""
        elsewhere = max(0.0, self.machine - sum(self.by_family.values()))
        return elsewhere / (self.at * cores) if self.at else 0.0


def read_clocks(broker_pid: int, postgres_pid: int, seat_pid: int) -> Clocks:
    """Reads the CPU clocks of the servers, of one seat, and of all its descendants.

    The time of a process that has ended counts for its parent after the parent has waited for it: the postmaster for a backend, the daemon
    for a Python worker. So processes that end between two readings are counted.
    """
    used = dict.fromkeys(FAMILIES, 0.0)
    used["broker"], used["Postgres"] = (sum(seconds_of(one, ended=True) for one in tree(pid)) for pid in (broker_pid, postgres_pid))
    for one in tree(seat_pid):
        with contextlib.suppress(psutil.Error):
            java = one.name() == "java"
            used["JVM" if java else "Python"] += seconds_of(one, ended=False)
            used["Python"] += seconds_of(one, ended=True) - seconds_of(one, ended=False)  # the children of a JVM are Python workers
    busy = psutil.cpu_times()
    machine = busy.user + busy.nice + busy.system + getattr(busy, "irq", 0.0) + getattr(busy, "softirq", 0.0)
    return Clocks(time.monotonic(), used, machine)


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def seconds_of(process: psutil.Process, *, ended: bool) -> float:
    """User and system seconds of a process. ``ended`` adds its ended children."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + ((times.children_user + times.children_system) if ended else 0.0)


def pss(process: psutil.Process) -> int:
    """Bytes; a page that several processes share is divided among them. 0 if the process has ended."""
    with contextlib.suppress(OSError, psutil.Error):
        return int(process.memory_full_info().pss)
    return 0


@contextlib.contextmanager
def repeated(act: Callable[[], None], every_s: float = 0.02) -> Iterator[None]:
    """Repeats a call while the block runs, and once more after it."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(every_s):
            act()
        act()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def timed(act: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.monotonic()
    act()
    return time.monotonic() - began


def spread(values: Sequence[float]) -> dict[str, float]:
    """``median, min, p99, max``; not a number if there are no values."""
    ordered = sorted(values) or [float("nan")]
    p99 = ordered[int(len(ordered) * 0.99)]
    return {"median": statistics.median(ordered), "min": ordered[0], "p99": p99, "max": ordered[-1]}
