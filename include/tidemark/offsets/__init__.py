"""Positions of a consumer group: who may move them, and the ledger of the moves.

Owns the tables ``topic``, ``consumer_group``, ``partition_offset``, ``attempt``, ``batch``, ``lost_range``, ``flow``,
``lag_partition`` and ``lag_history``, and keeps I1 (with
`tidemark.sink`), I2, I5 and I7. The life of a partition::

    (no row) --start--> free --claim--> owned at epoch n --move, move, ...--> owned --release--> free
                          ^                  |  claim by a newer generation: epoch n+1, the old owner is fenced
                          |                  v
                          +---- jump (a reset or a re-created topic): a lost_range row records what was skipped

Lock order: group, members, partitions by (topic, partition).

Modules::

    flow     pauses, priorities and `--max-ahead`
    ends     positions compared with the ends of the topics
    health   how a consumer does, why, and what ends it
    lag      how far groups are behind as of their last samples
    locks    waits for a lock, and reports its holder
    mirror   publishes positions to Kafka, for its tools
    reset    where a partition starts, and what is lost (I5)
    samples  stored samples of lag, and their history
    sampling takes a sample: asks Postgres and Kafka
    store    the statements on positions, attempts and the ledger
    window   trend and rates of a partition
"""
