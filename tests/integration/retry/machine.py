"""What the state machines of retries have in common: operators, rewinds, deaths, and the check that every record is accounted for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.integration.retry.lab import Lab, dying_at

from tidemark.retry.filter import Filter
from tidemark.rewind.plan import PlanRefused
from tidemark.rewind.plan_model import ToOffset
from tidemark.sink.steps import Step

LADDERS = (["5m", "5m", "30m"], ["5m"], ["30m", "5m"], ["1m", "5m", "5m", "5m", "5m"])
OPEN = ("WAITING", "HELD")
"""The states of records that are not settled."""

STEPS = st.sampled_from((*[None] * 14, *Step))
"""Where a commit dies. Mostly it does not."""


class RetryMachine(RuleBasedStateMachine):
    lab: Lab

    def start(self, lab: Lab) -> None:
        self.lab = lab
        lab.calls()  # removes what the previous example has left in the same folder
        self.rewinds: list[int] = []

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def operator_discards(self, data: Any) -> None:
        (number,) = data.draw(st.sampled_from(self.rows("failed_record_id", f"state IN {OPEN}")))
        self.lab.discard(Filter(numbers=(number,)))

    @precondition(lambda self: self.position() > 0)
    @rule(data=st.data())
    def operator_rewinds(self, data: Any) -> None:
        self.rewinds.append(self.lab.rewind(ToOffset(data.draw(st.integers(0, self.position())))).rewind_id)

    @precondition(lambda self: self.rewinds)
    @rule()
    def operator_undoes(self) -> None:
        with contextlib.suppress(PlanRefused):
            self.lab.undo(self.rewinds.pop())

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "lab"):
            self.lab.check()

    @contextlib.contextmanager
    def dying(self, step: Step | None) -> Iterator[None]:
        """Lets commits die just before this step, if one is given."""
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
            if step:
                stack.enter_context(dying_at(step, patch))
            yield

    def open(self) -> bool:
        """Whether a record is not settled."""
        return bool(set(OPEN) & set(self.lab.states()))

    def rows(self, columns: str, where: str) -> list[tuple[Any, ...]]:
        """Returns columns of the failed records for which ``where`` holds, oldest first."""
        query = f"SELECT {columns} FROM tidemark.failed_record WHERE group_id = %(group_id)s AND {where} ORDER BY failed_record_id"
        return [tuple(row) for row in self.lab.sql(query, group_id=self.lab.group_id)]

    def position(self) -> int:
        query = "SELECT coalesce(max(next_offset), 0) FROM tidemark.partition_offset WHERE group_id = %(group_id)s AND NOT drained"
        return int(self.lab.sql(query, group_id=self.lab.group_id)[0][0])
