"""Moving a running group's positions to any point, with the results that this supersedes.

Owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. A rewind's life::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |
       +--reject--> REJECTED          (expired: stays PLANNED, and is refused)

What fails, fails before anything is changed: a plan that is out of date (`StalePlan`) tells what has moved, and is made again.

Modules::

    apply           applies a plan in one transaction (I4)
    archive         moves rows out of the sink, and back
    backfill        reads later what a forward rewind skipped
    guards          triggers, rules, row security and foreign keys of the sink
    model           scenarios and plans as values
    moment          times and durations as people write them
    offsets_file    offsets from CSV or JSON
    overwritten     rows of an upsert sink that a replay overwrites
    plan            resolves a scenario to numbers and stores the plan
    retention       drops archives after their time
    scenario        scenarios with Kafka's names, from text and to text
    show            a plan as a table, JSON or Markdown
    store           reads, lists and rejects stored rewinds
    targets         the target offset of each partition
    undo            what prevents an undo
    verify          compares the archive with the replay
"""
