"""The base class of all errors that Tidemark raises, and four kinds that determine the caller's reaction.

`Refused`: the input, the spec or the environment is wrong. The same call fails again until it is fixed.
`Fenced`: a newer owner has the partitions. Nothing was stored, and a blind retry would only compete with the owner.
`Unavailable`: a broker, a database or a process is not available. The same call may succeed later (``retriable``).
`Broken`: an invariant did not hold. Nothing from that step was stored; it needs to be investigated.

Errors are keyword-only dataclasses, without a decorator: the fields are facts, and ``__str__`` builds the text from them. They can be
pickled, because Spark's executors send them to the driver.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform


def _restore(cls: type[TidemarkError], state: dict[str, Any]) -> TidemarkError:
    error = cls.__new__(cls)
    error.__dict__.update(state)
    return error


@dataclass_transform(kw_only_default=True, eq_default=False)
class TidemarkError(Exception):
    """Base of all errors that Tidemark raises."""

    kafka_name: ClassVar[str | None] = None
    """The error's name in Kafka's protocol, such as ``ILLEGAL_GENERATION``, if Kafka has one."""
    retriable: ClassVar[bool] = False
    """Whether the same call may succeed later, unchanged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(kw_only=True, eq=False)(cls)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), vars(self))


class Refused(TidemarkError):
    """The request is invalid as it stands."""


class Fenced(TidemarkError):
    """A newer owner holds the partition; nothing was stored."""


class Unavailable(TidemarkError):
    """A service that this call needs is not available now."""

    retriable = True


class Broken(TidemarkError):
    """An invariant did not hold; the step was rolled back."""


def message_of(error: BaseException) -> str:
    """The error's text. The ``__str__`` of an error that user code raises may itself raise, or return something else."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the user's code may raise anything
        return f"its text cannot be shown: {type(failure).__name__}"


class BadInput(Refused):
    """A setting, an argument or a file is unusable.

    ``what`` names it, ``found`` is the value or its problem, ``fix`` says what to write instead.
    """

    what: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.found}. {self.fix}"


class DatabaseUnavailable(Unavailable):
    """Postgres cannot be reached, or it ended the session; ``cause`` is its own message."""

    cause: str

    def __str__(self) -> str:
        return f"Postgres is not available: {self.cause}. This step stored nothing; try again when Postgres is back."


class ConnectionRefused(DatabaseUnavailable):
    """The database settings do not lead to a session: a wrong address, login, database or certificate, or a server that is down."""

    def __str__(self) -> str:
        return (
            f"Postgres cannot be used: {self.cause}. Nothing was changed. Unless Postgres is down, correct TIDEMARK_DATABASE_URL, or the "
            "Postgres connection in Airflow."
        )


class PasswordUnavailable(DatabaseUnavailable):
    """The command or function that gives the password of Postgres failed; it may work next time."""

    def __str__(self) -> str:
        return f"There is no password for Postgres: {self.cause}. Nothing was connected."


class StatementTimeout(DatabaseUnavailable):
    """The role's ``statement_timeout`` ended a statement, while it worked or waited for a lock."""

    def __str__(self) -> str:
        return (
            f"Postgres ended a statement: {self.cause}. This step stored nothing. A slice and a rewind are one statement each, so the role "
            "needs ALTER ROLE ... SET statement_timeout = 0, or a consumer smaller slices (batch.max_records)."
        )


class LockTimeout(DatabaseUnavailable):
    """Another session did not release a lock in time."""

    def __str__(self) -> str:
        return (
            f"Another session holds a lock: {self.cause}. This step stored nothing; the next try waits again. "
            "The log of a run names the session."
        )


class DatabaseReadOnly(DatabaseUnavailable):
    """Postgres responds but accepts no writes: it is a standby, or a failover is in progress."""

    def __str__(self) -> str:
        return (
            f"Postgres is read-only: {self.cause}. It is a standby, or default_transaction_read_only is on. Point the database URL at the "
            "primary, for example by listing several hosts with target_session_attrs=read-write."
        )


class BrokerUnavailable(Unavailable):
    """Kafka cannot be reached; ``cause`` is the client's own message."""

    cause: str

    def __str__(self) -> str:
        return f"Kafka is not available: {self.cause}. What was committed before stays; try again when Kafka is back."
