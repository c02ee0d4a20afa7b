-- What each change of a failed record's state costs.

-- Foreign keys that can never fail: topics and attempts are never deleted, and the ledger's row of the same transaction refers to the same
-- attempt and position. Each one looked its row up again for each record.
ALTER TABLE tidemark.failed_record
    DROP CONSTRAINT failed_record_hop_topic_id_fkey,
    DROP CONSTRAINT failed_record_attempt_id_fkey,
    DROP CONSTRAINT failed_record_group_id_topic_id_partition_fkey;

-- One index for what is due and for the list of all retries.
DROP INDEX tidemark.failed_record_unsettled;
CREATE INDEX failed_record_unsettled ON tidemark.failed_record (group_id, state, due_at) INCLUDE (error_type, created_at, failed_record_id)
 WHERE state IN ('WAITING', 'HELD', 'FAILED');
DROP INDEX tidemark.failed_record_due;

-- Settled records that still have their payloads, by when they were settled. It was by number, so each `tidemark maintain` read all of them.
DROP INDEX tidemark.failed_record_full;
CREATE INDEX failed_record_full ON tidemark.failed_record (changed_at)
 WHERE emptied_at IS NULL AND state IN ('LOADED', 'SKIPPED', 'DISCARDED');
