"""Positions of a consumer group: who may move them, and the ledger of the moves.

Owns the tables ``topic``, ``consumer_group``, ``partition_offset``, ``attempt``, ``batch``, ``lost_range`` and ``flow``, and keeps I1 (with
`tidemark.sink`), I2, I5 and I7. The life of a partition::

    (no row) --start--> free --claim--> owned at epoch n --move, move, ...--> owned --release--> free
                          ^                  |  claim by a newer generation: epoch n+1, the old owner is fenced
                          |                  v
                          +---- jump (a reset or a re-created topic): a lost_range row records what was skipped

`store` runs the statements on positions, attempts and the ledger, and never commits. `reset` decides where a partition starts and what to
do when its position is no longer in the log. `lag` says how far a group is behind. `flow` reads and writes pauses, priorities and the limit
on reading ahead, `locks` waits for locks and logs their holders. Lock order: group, members, partitions by (topic, partition).
"""
