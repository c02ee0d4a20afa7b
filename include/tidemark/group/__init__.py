"""The group protocol: which members a group has, which partitions each of them reads, and when that changes.

This is Kafka's classic protocol with Postgres as the coordinator: members join, the leader's assignor divides the partitions, all members
sync, and heartbeats keep their sessions alive. Offsets and fences (I1, I2) are not kept here but on each partition's own row, see
`tidemark.offsets`: a bug in the group protocol can delay a partition, but never load a record twice.

`member` takes part in a group and `listener` reports its partition changes; `coordinator` stores a group in Postgres. `machine` is the
protocol itself, `states` the table of legal transitions, `requests` the request and response types, `errors` the error responses.
`wake` ends waits early through LISTEN/NOTIFY, `named` loads users' classes by name, and `assignors` divide partitions among members.
"""
