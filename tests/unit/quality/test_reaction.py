"""The reaction to a verdict, for every kind of run and every ``on_failure``."""

from __future__ import annotations

import pytest

from tidemark.quality import Reaction, Verdict, reaction
from tidemark.spec import OnFailure, Validation

EVERY = [None, *(Validation(on_failure=one) for one in OnFailure)]


@pytest.mark.parametrize("may_rewind", [True, False])
@pytest.mark.parametrize("validation", EVERY, ids=lambda one: "none" if one is None else one.on_failure.value)
@pytest.mark.parametrize("outcome", [Verdict.PASSED, Verdict.WARNING])
def test_what_has_passed_is_published(outcome: Verdict, validation: Validation | None, may_rewind: bool) -> None:
    assert reaction(outcome, validation, may_rewind=may_rewind) is Reaction.PUBLISH


@pytest.mark.parametrize(
    ("on_failure", "may_rewind", "reacts"),
    [
        (OnFailure.REPORT, True, Reaction.PUBLISH),
        (OnFailure.REPORT, False, Reaction.PUBLISH),
        (OnFailure.BLOCK, True, Reaction.BLOCK),
        (OnFailure.BLOCK, False, Reaction.BLOCK),
        (OnFailure.REWIND, True, Reaction.REWIND),
        (OnFailure.REWIND, False, Reaction.BLOCK),
        (None, True, Reaction.BLOCK),
        (None, False, Reaction.BLOCK),
    ],
)
def test_a_critical_verdict_does_what_the_file_says(on_failure: OnFailure | None, may_rewind: bool, reacts: Reaction) -> None:
    """Without a suite the conservation check still blocks."""
    validation = None if on_failure is None else Validation(on_failure=on_failure)
    assert reaction(Verdict.CRITICAL, validation, may_rewind=may_rewind) is reacts
