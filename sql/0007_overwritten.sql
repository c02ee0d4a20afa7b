-- What is written over in upsert sinks while a rewind can still be undone: kept, so that the undo gives that back too.

-- From where on the rows of a partition go if one of its rewinds is undone; the greatest such offset where several could be. A row before
-- it that is written over is kept. No row: nothing can be undone, and nothing has to be kept.
CREATE TABLE tidemark.undo_floor (
    group_id  integer  NOT NULL,
    topic_id  smallint NOT NULL,
    partition integer  NOT NULL,
    sink      text     NOT NULL,                              -- schema.table
    rewind_id bigint   NOT NULL REFERENCES tidemark.rewind,   -- the last one of the partition: what is written over is kept under it
    floor     bigint   NOT NULL,
    PRIMARY KEY (group_id, topic_id, partition),
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset ON DELETE CASCADE
) WITH (fillfactor = 50); -- locked by each commit under a floor
CREATE INDEX undo_floor_sink ON tidemark.undo_floor (sink, topic_id, partition);

ALTER TABLE tidemark.rewind_partition ADD COLUMN floor_before bigint; -- the floor when the rewind was applied; null: there was none

-- Rows that are not in their sink, as they were. Written by commits: no foreign keys, which would be checked row by row.
CREATE TABLE tidemark.rewound_row (
    number          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    rewind_id       bigint   NOT NULL, -- the last rewind of the partition at that time
    group_id        integer  NOT NULL,
    topic_id        smallint NOT NULL, -- with the partition: of the record, or of the batch, that took the row's place
    partition       integer  NOT NULL,
    sink            text     NOT NULL,
    elsewhere       boolean  NOT NULL, -- the row was made from another partition: offsets do not say which one is the later
    kafka_topic_id  smallint NOT NULL,
    kafka_partition integer  NOT NULL,
    kafka_offset    bigint   NOT NULL,
    kafka_seq       integer  NOT NULL,
    kept            jsonb    NOT NULL, -- the row's columns, each as text: the table may have other columns by the time it comes back
    parked_by       bigint             -- the undo that took back what this row was part of; the undo of that one wants it again
);
CREATE INDEX rewound_row_partition ON tidemark.rewound_row (group_id, topic_id, partition, rewind_id);

-- Since when the rows are not kept any more that were written over since; null: they are. What rewinds of before this migration wrote over
-- never was.
ALTER TABLE tidemark.rewind_group ADD COLUMN overwritten_removed_at timestamptz;
UPDATE tidemark.rewind_group SET overwritten_removed_at = clock_timestamp();
