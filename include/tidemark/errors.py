"""Every error Tidemark raises: one base class, and four kinds that decide what a caller does next.

`Refused` — the input, the spec or the environment is wrong; the same call fails again until somebody mends it.
`Fenced` — somebody newer owns the partitions; nothing was stored, and trying again blindly would only fight the owner.
`Unavailable` — a broker, a database or a process went away; the same call may succeed later (``retriable``).
`Broken` — an invariant did not hold. Nothing of that step was stored; somebody has to look.

Errors are keyword-only dataclasses: fields are facts, the text is a sentence made of them. They survive pickling, because Spark's
executors hand them to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


def _restore(cls: type[TidemarkError], state: dict[str, Any]) -> TidemarkError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    return error


class TidemarkError(Exception):
    """Base of everything Tidemark raises."""

    kafka_name: ClassVar[str | None] = None
    """The error's name in Kafka's protocol (``ILLEGAL_GENERATION``), where Kafka has one."""
    retriable: ClassVar[bool] = False
    """May the same call, unchanged, succeed later?"""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), vars(self))


class Refused(TidemarkError):
    """What was asked for cannot be done as it stands."""


class Fenced(TidemarkError):
    """A newer owner holds the partition; nothing was stored."""


class Unavailable(TidemarkError):
    """Something this call needs is not there now."""

    retriable = True


class Broken(TidemarkError):
    """A rule that must always hold did not; the step was rolled back."""


@dataclass(kw_only=True, eq=False)
class BadInput(Refused):
    """A setting, an argument or a file is unusable.

    ``what`` names it, ``found`` is its value as the user wrote it, ``fix`` says what to write instead.
    """

    what: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found}. {self.fix}"


@dataclass(kw_only=True, eq=False)
class DatabaseUnavailable(Unavailable):
    """Postgres cannot be reached, or ended the session; ``cause`` is its own message."""

    cause: str

    def __str__(self) -> str:
        return f"Postgres is not available: {self.cause}. Nothing was stored by this step; try again when it is back."


@dataclass(kw_only=True, eq=False)
class DatabaseReadOnly(DatabaseUnavailable):
    """Postgres answers, but takes no writes: a standby, or a failover that is under way."""

    def __str__(self) -> str:
        return (
            f"Postgres is read-only: {self.cause}. It is a standby, or default_transaction_read_only is on. Point the database URL at the "
            "primary, for example with several hosts and target_session_attrs=read-write."
        )


@dataclass(kw_only=True, eq=False)
class BrokerUnavailable(Unavailable):
    """Kafka cannot be reached; ``cause`` is the client's own message."""

    cause: str

    def __str__(self) -> str:
        return f"Kafka is not available: {self.cause}. No offset was moved; try again when it is back."
