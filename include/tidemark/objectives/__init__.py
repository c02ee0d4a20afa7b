"""Objectives of consumers (``slo`` in their files): judges them, and reports misses and recoveries once.

Owns the table ``objective``. The life of an objective of a consumer::

    (no row)  --missed: a row is stored, and reported by failing a task-->  reported
        ^                                                                      |
        +--------------- met again: the row is deleted, and logged ------------+

Only the session that stores or deletes the row reports it, so a change is reported once. It stores before it reports. If it dies in
between, its task fails as well, and that is the report; if it dies before, the next check finds the same change.

An objective keeps its state while it is uncertain. It counts as missed after a time without
information that is longer than its limit.

Modules::

    judge    judges the facts, without a database
    store    reads the facts, stores reported changes
"""

from tidemark.objectives.judge import Objective, ObjectiveChanges
from tidemark.objectives.store import changes, report

__all__ = ["Objective", "ObjectiveChanges", "changes", "report"]
