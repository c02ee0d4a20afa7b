-- What the metrics process reads, at a cost that does not grow with the age of a database.

-- When the commit began. Null for batches committed before this migration.
ALTER TABLE tidemark.batch ADD COLUMN began_at timestamptz;
ALTER TABLE tidemark.batch ALTER COLUMN began_at SET DEFAULT transaction_timestamp();
ALTER TABLE tidemark.rewound_batch ADD COLUMN began_at timestamptz;

CREATE INDEX attempt_ended ON tidemark.attempt (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX failed_record_unsettled ON tidemark.failed_record (group_id, state) WHERE state IN ('WAITING', 'HELD', 'FAILED');
