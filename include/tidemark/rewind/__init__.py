"""Moving a running group's positions to any point, with the results that this supersedes.

Owns the tables ``rewind``, ``rewind_group``, ``rewind_partition``, ``rewind_archive``, ``rewound_*``, ``undo_floor`` and
``backfill*``, and keeps I4. A rewind's life::

    PLANNED --apply--> APPLIED --its undo is applied--> UNDONE
       |
       +--reject--> REJECTED          (expired: stays PLANNED, and is refused)

`scenario`, `scope`, `moment` and `offsets_file` read what a person writes (values in, values out), `targets` and `plan` make numbers of
it, `apply` moves positions, ledger and rows in one transaction, `archive` keeps the rows, `overwritten` those that a replay writes over,
`undo` says what stands against putting them back, `verify` compares them with what the replay has made, `retention` drops them after
their time, `backfill` has what a rewind forward skips read later, `show` prints.

What fails, fails before anything is changed: a plan that is out of date (`StalePlan`) tells what has moved, and is made again.
"""
