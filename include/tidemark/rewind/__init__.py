"""Rewinds move a running group's positions to any point and take out the results that the move supersedes.

The package owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. States of a rewind::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |
       +--reject--> REJECTED          (an expired plan stays PLANNED; applying it is refused)

A rewind that cannot be done fails before it changes anything. A stale plan (`StalePlan`) reports what has moved; make a new one.

Modules::

    adopt              a consumer without positions starts where a group has committed in Kafka
    apply              applies a plan in one transaction (I4)
    archive_retention  drops archives after their time
    backfill           reads later what a forward rewind skipped
    guards             triggers, rules, row security and foreign keys of the sink
    plan               resolves a scenario to numbers and stores the plan
    plan_model         scenarios and plans as values
    plan_text          a plan as a table, JSON or Markdown
    reaction           the rewind after a critical verdict (`on_failure: rewind`)
    rows               the rows of a sink that a rewind takes out
    scenarios          where a rewind goes
    store              reads, lists and rejects stored rewinds
    undo               what prevents an undo
    verify             compares the archive with the replay
"""
