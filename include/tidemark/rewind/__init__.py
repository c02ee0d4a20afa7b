"""Rewinds move a running group's positions to any point and take out the results that the move supersedes.

The package owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. States of a rewind::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |
       +--reject--> REJECTED          (an expired plan stays PLANNED; applying it is refused)

- `model`: the values: scenarios and plans
- `scenario`: parses scenarios, stores them as JSON and describes them
- `offsets_file`: reads a file of offsets
- `targets`: resolves a scenario to offsets
- `plan`: makes and stores a plan
- `store`: reads, lists and rejects stored plans
- `show`: prints plans
- `apply`: moves positions, ledger and rows in one transaction
- `archive`: moves rows out of a sink and back
- `overwritten`: restores the rows that a replay overwrote in an upsert sink
- `guards`: checks the sink's triggers, rules, row security and foreign keys
- `undo`: checks whether a rewind can be undone
- `verify`: compares the archived rows with the replayed ones
- `backfill`: reads later what a forward rewind skipped
- `reaction`: rewinds a run whose validation was critical
- `retention`: drops old archives

A rewind that cannot be done fails before it changes anything. A stale plan (`StalePlan`) reports what has moved; make a new one.
"""
