"""Rewinds move a running group's positions to any point and take out the results that the move supersedes.

The package owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. States of a rewind::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |
       +--reject--> REJECTED          (an expired plan stays PLANNED; applying it is refused)

A rewind that cannot be done fails before it changes anything. A stale plan (`StalePlan`) reports what has moved; make a new one.

Modules::

    adopt           a consumer without positions starts where a group has committed in Kafka
    apply           applies a plan in one transaction (I4)
    archive         moves rows out of the sink, and back
    backfill        reads later what a forward rewind skipped
    deleted         takes deletions of an upsert sink back, and repeats them
    guards          triggers, rules, row security and foreign keys of the sink
    model           scenarios and plans as values
    offsets_file    offsets from CSV or JSON
    overwritten     rows of an upsert sink that a replay overwrites
    plan            resolves a scenario to numbers and stores the plan
    reaction        the rewind after a critical verdict (`on_failure: rewind`)
    retention       drops archives after their time
    scenario        scenarios with Kafka's names, from text and to text
    show            a plan as a table, JSON or Markdown
    store           reads, lists and rejects stored rewinds
    targets         the target offset of each partition
    undo            what prevents an undo
    verify          compares the archive with the replay
"""
