"""How tests run Hypothesis' state machines on a real database."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.support.sampling import examples
from tidemark.db import session, transaction


def run_machine(machine: type[RuleBasedStateMachine], url: str, /, *, number: int, steps: int, **attributes: Any) -> None:
    """Runs ``number`` examples of up to ``steps`` steps (see `examples`) of the machine with these class attributes. All examples share
    the database, which need not survive a crash of Postgres."""
    with session(url) as connection, transaction(connection) as cur:
        cur.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")
    one = type(machine.__name__, (machine,), attributes)
    run_state_machine_as_test(
        one, settings=settings(max_examples=examples(number), stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    )
