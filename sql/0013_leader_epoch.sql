-- The history of a log that a position belongs to. A log that was truncated and grew again has other records at the same offsets.

-- Kafka's leader epoch in which the log reached up to next_offset (KIP-320); null: unknown, for a position that nobody has read up to.
ALTER TABLE tidemark.partition_offset ADD COLUMN leader_epoch integer CHECK (leader_epoch >= 0);
