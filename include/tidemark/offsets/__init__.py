"""Positions of a consumer group: their owners, and the ledger of commits.

Owns the tables ``topic``, ``consumer_group``, ``partition_offset``, ``attempt``, ``batch``, ``lost_range``, ``flow``,
``lag_partition`` and ``lag_history``, and guarantees I1 (with
`tidemark.sink`), I2, I5 and I7. The life of a partition::

    (no row) --start--> free --claim--> owned at epoch n --move, move, ...--> owned --release--> free
                          ^                  |  claim by a newer generation: epoch n+1, the old owner is fenced
                          |                  v
                          +---- jump (a reset or a re-created topic): a lost_range row records what was skipped

Lock order: group, members, partitions by (topic, partition).

Modules::

    flow     pauses, priorities and `--max-ahead`
    ends     positions compared with the ends of the topics
    health   a consumer's health: state, reason, fix
    lag      lag of groups as of their last samples
    locks    logs the holders of a lock
    mirror   publishes positions to Kafka, for its tools
    reset    where a partition starts, and lost ranges (I5)
    samples  stored samples of lag, and their history
    sampling takes a sample from Postgres and Kafka
    store    statements on positions, attempts and the ledger
    window   trend and rates of a partition
"""
