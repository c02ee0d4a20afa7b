"""Objectives of consumers (``slo`` in their files): which are missed, and what is still to be reported of them.

Owns the table ``objective``. The life of an objective of a consumer::

    (no row)  --missed: a row is stored, and reported by failing a task-->  reported
        ^                                                                      |
        +--------------- met again: the row is deleted, and logged ------------+

Only the session that stores or deletes the row reports it, so a change is reported once. It stores before it reports. If it dies in
between, its task fails as well, and that is the report; if it dies before, the next look finds the same change.

An objective whose state is uncertain stays as it was. But if nothing has been known for longer than the objective, it counts as missed,
because nobody can promise it any more.

Modules::

    judge    facts to missed objectives, without a database
    store    reads the facts, stores what was reported
"""

from tidemark.objectives.judge import News, Objective
from tidemark.objectives.store import changes, report

__all__ = ["News", "Objective", "changes", "report"]
