-- Deletes in upsert sinks: which record deleted which key. So an older record that comes late does not bring the row back, and a rewind can
-- take the deletion back.

CREATE TABLE tidemark.deletion (
    deletion_id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sink            text     NOT NULL, -- schema.table
    kafka_topic_id  smallint NOT NULL, -- the record that deletes, and the number of the deletion among the record's rows
    kafka_partition integer  NOT NULL,
    kafka_offset    bigint   NOT NULL,
    kafka_seq       integer  NOT NULL,
    digest          bytea    NOT NULL, -- SHA-256 of the key
    key             jsonb    NOT NULL, -- the key's columns, each as text
    -- The deleted row, each column as text, and its record. Null: there was none, it is in the sink, or it is no longer kept.
    kept            jsonb,
    kept_topic_id   smallint,
    kept_offset     bigint,
    deleted_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    parked_by       bigint             -- the rewind that took the deletion back; null: it is in force
);
-- The next deletion of a key after a record is its first entry: without the order, Postgres may search by record instead.
CREATE INDEX deletion_key ON tidemark.deletion (sink, digest, kafka_topic_id, kafka_offset, kafka_seq);
CREATE INDEX deletion_record ON tidemark.deletion (sink, kafka_topic_id, kafka_partition, kafka_offset) WHERE parked_by IS NULL;
CREATE INDEX deletion_parked ON tidemark.deletion (parked_by) WHERE parked_by IS NOT NULL;
CREATE INDEX deletion_age ON tidemark.deletion (deleted_at) WHERE kept IS NOT NULL;

-- How many of a batch's sink_rows are deletions.
ALTER TABLE tidemark.batch ADD COLUMN deleted bigint NOT NULL DEFAULT 0 CHECK (deleted >= 0);
CREATE TRIGGER append_only_deleted BEFORE UPDATE OF deleted ON tidemark.batch FOR EACH STATEMENT EXECUTE FUNCTION tidemark.append_only();
ALTER TABLE tidemark.rewound_batch ADD COLUMN deleted bigint NOT NULL DEFAULT 0;

-- Whoever may take back batches may take back these.
DO $$
DECLARE
    rewinder text;
BEGIN
    FOR rewinder IN SELECT DISTINCT grantee FROM information_schema.role_table_grants
                     WHERE table_schema = 'tidemark' AND table_name = 'rewound_batch' AND privilege_type = 'DELETE' LOOP
        EXECUTE format('GRANT DELETE ON tidemark.deletion TO %I', rewinder);
    END LOOP;
END
$$;
