"""The group protocol: who belongs to a group, which partitions each member reads, and when that changes.

Kafka's classic protocol with Postgres as the coordinator: members join, the leader's assignor divides the partitions, everybody
synchronizes, heartbeats keep the seats. `tidemark.group.assignors` is the part that divides: pure functions of the topics and of what the
members report, without a service. The offsets and the fence of each partition (I1, I2) are not kept here but on the partition's own
row, see `tidemark.offsets`: a group that errs can delay a partition, never load a record twice.

Modules::

    assignors      who reads which partition
    coordinator    requests as transactions on the group's rows
    errors         the coordinator's errors, with Kafka's names
    listener       the callbacks for partitions that are assigned, revoked or lost
    machine        the protocol as a state machine over values
    member         the client: joins, sends heartbeats, calls listeners
    named          finds a user's class by `module:Class`
    requests       requests and responses as values
    states         the states and their transitions
    wake           waits for a notification, with polling as the fallback
"""
