"""Positions of a consumer group: who may move them, and the ledger of what was moved.

Owns the tables ``topic``, ``consumer_group``, ``partition_offset``, ``attempt``, ``batch`` and ``lost_range``, and keeps I1 (with
`tidemark.sink`), I2, I5 and I7. A partition's life::

    (no row) --start--> free --claim--> owned at epoch n --move, move, ...--> owned --release--> free
                          ^                  |  claim by a newer generation: epoch n+1, the old owner is fenced
                          |                  v
                          +---- jump (a reset or a re-created topic): a lost_range row says what was left out

`ranges` decides what to read (values in, values out), `store` runs the statements of ``store.sql`` beside it and never commits.
Locks are taken in the order group, members, partitions by (topic, partition).

Modules::

    flow      pauses, priorities and `--max-ahead`
    lag       positions compared with the ends of the topics
    locks     waits for a lock, and reports its holder
    ranges    what a batch reads, decided from numbers alone
    reset     where a partition starts, and what is lost (I5)
    store     the statements on positions, attempts and the ledger
"""
