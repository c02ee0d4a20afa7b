"""The group protocol: a group's members, their partitions, and rebalances.

This is Kafka's classic protocol with Postgres as the coordinator: members join, the leader's assignor divides the partitions, all members
sync, and heartbeats keep their sessions alive. Offsets and fences (I1, I2) are not kept here but on each partition's own row, see
`tidemark.offsets`: a bug in the group protocol can delay a partition, but never load a record twice.

Modules::

    assignors      divide the partitions among the members
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
