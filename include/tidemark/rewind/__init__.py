"""Rewinds move a running group's positions to any point and take out the superseded results.

The package owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. States of a rewind::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |                  ^
       |                  +---swap--- BESIDE --discard--> DISCARDED     (a rewind beside: its apply begins it)
       |
       +--reject--> REJECTED          (an expired plan stays PLANNED; applying it is refused)

An impossible rewind fails before it changes anything. A stale plan (`StalePlan`) reports the changes since; make a new one.

Modules::

    adopt              starts a consumer at the offsets that a group has committed in Kafka
    apply              applies a plan in one transaction (I4)
    archive_retention  drops old archives
    backfill           reads records that a forward rewind skipped
    beside             reads records again into tables beside the sinks, and swaps them in
    guards             triggers, rules, row security and foreign keys of the sink
    plan               resolves a scenario to offsets and stores the plan
    plan_model         scenarios and plans as values
    plan_text          formats a plan as a table, JSON or Markdown
    reaction           the rewind after a critical verdict (`on_failure: rewind`)
    rows               the rows of a sink that a rewind takes out
    scenarios          the targets of rewinds
    side               side groups of backfills and of replays beside
    store              reads, lists and rejects stored rewinds
    undo               checks whether a rewind can be undone
    verify             compares the archive with the replay
"""
