-- Rewinds: plans and their outcome, kept permanently, and what they took out of sinks and ledger.

-- The order in which rewinds were applied. Their ids are in the order of planning.
CREATE SEQUENCE tidemark.rewind_applied AS bigint;

-- A rewind: what was asked for, and who decided what and when.
CREATE TABLE tidemark.rewind (
    rewind_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state       text        NOT NULL DEFAULT 'PLANNED'
        CHECK (state IN ('PLANNED', 'REJECTED', 'BESIDE', 'DISCARDED', 'APPLIED', 'UNDONE')),
    scenario    jsonb       NOT NULL,
    undo_of     bigint REFERENCES tidemark.rewind,
    allow_loss  boolean     NOT NULL,
    reason      text        NOT NULL CHECK (length(btrim(reason)) >= 10),
    planned_by  text        NOT NULL CHECK (planned_by <> ''),
    planned_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz NOT NULL,
    digest      text        NOT NULL, -- of all that the plan says and of the state that must not change until it is applied
    dag_id      text,
    run_id      text,
    decided_by  text CHECK (decided_by <> ''), -- who approved or rejected it
    decided_at  timestamptz,
    applied_by  text CHECK (applied_by <> ''),
    applied_at  timestamptz,
    applied_no  bigint UNIQUE,
    backfill    boolean     NOT NULL DEFAULT false, -- what the rewind skips is to be read later
    -- Its records are first read into tables beside the sink (shadows), by a side group. The swap then applies the rewind.
    beside      boolean     NOT NULL DEFAULT false,
    transform   text CHECK (transform <> ''), -- a rehearsal: the replay beside reads with it, and is never swapped; null: with the consumer's
    started_by  text CHECK (started_by <> ''), -- who began the replay beside
    started_at  timestamptz,
    hold_until  timestamptz, -- until then its groups begin no batch, so that the replay beside reaches their positions
    CHECK (NOT (beside AND (backfill OR undo_of IS NOT NULL))),
    CHECK ((started_at IS NULL) = (started_by IS NULL) AND (beside OR started_at IS NULL)),
    CHECK (state NOT IN ('BESIDE', 'DISCARDED') OR started_at IS NOT NULL),
    CHECK (transform IS NULL OR (beside AND state NOT IN ('APPLIED', 'UNDONE'))),
    CHECK (undo_of < rewind_id),
    CHECK ((decided_by IS NULL) = (decided_at IS NULL)),
    CHECK (state <> 'REJECTED' OR decided_by IS NOT NULL),
    CHECK ((state IN ('APPLIED', 'UNDONE')) = (applied_at IS NOT NULL)),
    CHECK ((applied_at IS NULL) = (applied_by IS NULL) AND (applied_at IS NULL) = (applied_no IS NULL))
);
CREATE INDEX rewind_run ON tidemark.rewind (dag_id, run_id) WHERE dag_id IS NOT NULL;
CREATE INDEX rewind_beside ON tidemark.rewind (rewind_id) WHERE state = 'BESIDE';
ALTER TABLE tidemark.attempt ADD FOREIGN KEY (of_rewind) REFERENCES tidemark.rewind;
ALTER TABLE tidemark.lost_range ADD FOREIGN KEY (rewind_id) REFERENCES tidemark.rewind;

-- A consumer in a rewind, as it was when the plan was made.
CREATE TABLE tidemark.rewind_group (
    rewind_id     bigint  NOT NULL REFERENCES tidemark.rewind,
    group_id      integer NOT NULL REFERENCES tidemark.consumer_group,
    consumer      text    NOT NULL,
    group_name    text    NOT NULL, -- a deleted group's row loses its name
    sink          text    NOT NULL, -- schema.table
    basis         jsonb   NOT NULL, -- what makes the plan stale if it changes: {"spec": {}, "columns": [], "last_rewind": applied_no}
    group_state   text    NOT NULL,
    in_flight     integer NOT NULL, -- attempts that were running
    lag           bigint  NOT NULL,
    records_per_s double precision, -- null: it has not read yet
    announced_assets          text[]  NOT NULL, -- assets whose events have announced rows that go
    -- Since when rows that were overwritten after the rewind are no longer kept; null: they are.
    overwritten_removed_at timestamptz,
    sinks         text[], -- of a consumer with several tables, for which `sink` lists them all; null: only `sink`
    shadow_bytes  bigint, -- of a rewind beside: about how much space its shadows will take; null: not beside
    side_id       integer UNIQUE, -- of a replay beside: its side group
    PRIMARY KEY (rewind_id, group_id),
    FOREIGN KEY (side_id, group_id) REFERENCES tidemark.consumer_group (group_id, side_of)
);
CREATE INDEX rewind_group_group ON tidemark.rewind_group (group_id, rewind_id);
CREATE INDEX rewind_group_consumer ON tidemark.rewind_group (consumer, rewind_id);
CREATE INDEX rewind_group_kept ON tidemark.rewind_group (rewind_id) WHERE overwritten_removed_at IS NULL;

-- The before-image of each partition, and where it went. Until the rewind is applied, old_offset and what else is only known then is null.
CREATE TABLE tidemark.rewind_partition (
    rewind_id              bigint   NOT NULL,
    group_id               integer  NOT NULL,
    topic_id               smallint NOT NULL REFERENCES tidemark.topic,
    partition              integer  NOT NULL,
    hold                   boolean  NOT NULL, -- stays where the group is: its epoch is raised, and nothing else
    target                 bigint   NOT NULL CHECK (target >= 0), -- what the scenario comes to
    planned_offset         bigint   NOT NULL, -- where the group was when the plan was made
    new_offset             bigint   NOT NULL, -- greater than the target only where the log begins behind it. Beside: where the replay begins
    superseded_from        bigint   NOT NULL, -- from here on the ledger is another one; rows and failed records go
    planned_sink_rows      bigint   NOT NULL DEFAULT 0,
    planned_failed_records bigint   NOT NULL DEFAULT 0,
    old_offset             bigint,
    old_validated_offset   bigint,
    owner_epoch            bigint, -- the one that it was raised to
    sink_rows              bigint,
    failed_records         bigint,
    floor_before           bigint, -- the floor when the rewind was applied; null: there was none
    PRIMARY KEY (rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id) REFERENCES tidemark.rewind_group,
    CHECK (new_offset >= target OR hold),
    CHECK (superseded_from <= new_offset)
);
-- Rewinds that took a partition from a given offset or a later one: those whose replay may not have ended.
CREATE INDEX rewind_partition_partition ON tidemark.rewind_partition (group_id, topic_id, partition, old_offset);

-- The tables that hold superseded rows, with the columns of their sink: tidemark_archive.rewound_<rewind_id>_<number>. An archive may lose all
-- of its rows to erasures; it stays, so that its rewind can be undone.
CREATE TABLE tidemark.rewind_archive (
    rewind_id       bigint      NOT NULL,
    number          integer     NOT NULL CHECK (number > 0),
    group_id        integer     NOT NULL,
    sink            text        NOT NULL,
    relation        text        NOT NULL UNIQUE,
    table_partition boolean     NOT NULL, -- was a partition of the sink
    rows            bigint      NOT NULL CHECK (rows >= 0),
    put_back_at     timestamptz, -- by an undo: its rows are in the sink again, the table is gone
    removed_at      timestamptz, -- its time was over: the table is gone, and the rewind cannot be undone any more
    -- A replay beside writes into it, and the swap puts its rows into the sink. It has no other rows and takes none out of the sink.
    shadow          boolean     NOT NULL DEFAULT false,
    PRIMARY KEY (rewind_id, number),
    FOREIGN KEY (rewind_id, group_id) REFERENCES tidemark.rewind_group
);
CREATE INDEX rewind_archive_kept ON tidemark.rewind_archive (rewind_id) WHERE put_back_at IS NULL AND removed_at IS NULL;

-- What rewinds took out of the ledger, as it was. A later migration that adds a column to batch, failed_record or lost_range adds it here too.
CREATE TABLE tidemark.rewound_batch (
    rewound_by bigint NOT NULL REFERENCES tidemark.rewind,
    LIKE tidemark.batch,
    PRIMARY KEY (rewound_by, batch_id)
);
CREATE INDEX rewound_batch_batch ON tidemark.rewound_batch (batch_id);
CREATE TABLE tidemark.rewound_failed_record (
    rewound_by bigint NOT NULL REFERENCES tidemark.rewind,
    LIKE tidemark.failed_record,
    PRIMARY KEY (rewound_by, failed_record_id)
);
CREATE TABLE tidemark.rewound_lost_range (
    rewound_by bigint NOT NULL REFERENCES tidemark.rewind,
    LIKE tidemark.lost_range,
    PRIMARY KEY (rewound_by, lost_range_id)
);

-- From where on the rows of a partition go if one of its rewinds is undone; the greatest such offset where several could be. A row before
-- it that is overwritten is kept. No row: nothing can be undone, and nothing has to be kept.
CREATE TABLE tidemark.undo_floor (
    group_id  integer  NOT NULL,
    topic_id  smallint NOT NULL,
    partition integer  NOT NULL,
    sink      text     NOT NULL,                              -- schema.table
    rewind_id bigint   NOT NULL REFERENCES tidemark.rewind,   -- the last one of the partition: what is written over is kept under it
    floor     bigint   NOT NULL,
    sinks     text[],                                         -- of a consumer with several tables; null: only `sink`
    PRIMARY KEY (group_id, topic_id, partition),
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset ON DELETE CASCADE
) WITH (fillfactor = 50); -- locked by each commit under a floor
CREATE INDEX undo_floor_sink ON tidemark.undo_floor (sink, topic_id, partition);
CREATE INDEX undo_floor_place ON tidemark.undo_floor (topic_id, partition);

-- Rows of upsert sinks that are overwritten while a rewind can still be undone. Written by commits: no foreign keys, which would be checked row
-- by row.
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

-- What a rewind has skipped of a partition, [start_offset, end_offset), to be read later by runs of their own into the same sink. How far it has
-- been read is the position of the side group.
CREATE TABLE tidemark.backfill (
    rewind_id    bigint   NOT NULL,
    group_id     integer  NOT NULL,
    topic_id     smallint NOT NULL,
    partition    integer  NOT NULL,
    side_id      integer  NOT NULL REFERENCES tidemark.consumer_group, -- the side group
    start_offset bigint   NOT NULL,
    end_offset   bigint   NOT NULL, -- nearer once a rewind has gone back into the range: from there on the group reads it itself
    PRIMARY KEY (rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id, topic_id, partition) REFERENCES tidemark.rewind_partition,
    FOREIGN KEY (side_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    CHECK (end_offset >= start_offset)
);
CREATE INDEX backfill_partition ON tidemark.backfill (group_id, topic_id, partition);

-- Which rewind has drawn a backfill's end nearer, and from where: its undo gives that back.
CREATE TABLE tidemark.backfill_cut (
    cut_by        bigint   NOT NULL REFERENCES tidemark.rewind,
    rewind_id     bigint   NOT NULL,
    group_id      integer  NOT NULL,
    topic_id      smallint NOT NULL,
    partition     integer  NOT NULL,
    end_offset    bigint   NOT NULL,
    given_back_by bigint REFERENCES tidemark.rewind,
    PRIMARY KEY (cut_by, rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id, topic_id, partition) REFERENCES tidemark.backfill
);

-- A rewind moves batches, failed records and lost ranges between the ledger, its archive and a side group. These functions do that as the
-- owner: no other role deletes from these tables, changes a batch's group or writes to the archive, so nothing can be lost or changed on the
-- way.
CREATE FUNCTION tidemark.take_from_ledger(applied bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tidemark.rewind WHERE rewind_id = applied AND state = CASE WHEN beside THEN 'BESIDE' ELSE 'PLANNED' END) THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s is not one that is being applied.', applied);
    END IF;
    -- Failed records in any state; pending retries are withdrawn. Stores their number per partition.
    WITH gone AS (
        DELETE FROM tidemark.failed_record USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND failed_record.group_id = part.group_id AND failed_record.topic_id = part.topic_id AND failed_record.partition = part.partition
           AND failed_record.record_offset >= part.superseded_from
        RETURNING failed_record.*
    ), kept AS (
        INSERT INTO tidemark.rewound_failed_record SELECT applied, gone.* FROM gone
    ), counted AS (
        SELECT group_id, topic_id, partition, count(*) AS records FROM gone GROUP BY group_id, topic_id, partition
    )
    UPDATE tidemark.rewind_partition part SET failed_records = coalesce(records, 0)
      FROM tidemark.rewind_partition mine LEFT JOIN counted USING (group_id, topic_id, partition)
     WHERE part.rewind_id = applied AND mine.rewind_id = part.rewind_id
       AND mine.group_id = part.group_id AND mine.topic_id = part.topic_id AND mine.partition = part.partition;
    -- Batches, including the one that the rewind cuts.
    WITH gone AS (
        DELETE FROM tidemark.batch USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND batch.group_id = part.group_id AND batch.topic_id = part.topic_id AND batch.partition = part.partition
           AND batch.end_offset > part.superseded_from
           AND batch.start_offset >= coalesce((SELECT max(start_offset) FROM tidemark.batch before
                                                WHERE before.group_id = part.group_id AND before.topic_id = part.topic_id
                                                  AND before.partition = part.partition AND before.start_offset <= part.superseded_from),
                                              part.superseded_from)
        RETURNING batch.*
    )
    INSERT INTO tidemark.rewound_batch SELECT applied, gone.* FROM gone;
    -- Lost ranges, including those of forward rewinds.
    WITH gone AS (
        DELETE FROM tidemark.lost_range USING tidemark.rewind_partition part
         WHERE part.rewind_id = applied AND NOT part.hold
           AND lost_range.group_id = part.group_id AND lost_range.topic_id = part.topic_id AND lost_range.partition = part.partition
           AND (lost_range.end_offset > part.superseded_from OR lost_range.end_offset IS NULL)
        RETURNING lost_range.*
    )
    INSERT INTO tidemark.rewound_lost_range SELECT applied, gone.* FROM gone;
END
$$;

CREATE FUNCTION tidemark.put_back_in_ledger(applied bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    undone bigint := (SELECT undo_of FROM tidemark.rewind WHERE rewind_id = applied AND state = 'PLANNED');
BEGIN
    IF undone IS NULL THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s is not an undo that is being applied.', applied);
    END IF;
    -- The parts of cut batches and ranges, which come back whole.
    DELETE FROM tidemark.batch WHERE head_of IN (SELECT batch_id FROM tidemark.rewound_batch WHERE rewound_by = undone);
    DELETE FROM tidemark.lost_range WHERE head_of IN (SELECT lost_range_id FROM tidemark.rewound_lost_range WHERE rewound_by = undone);
    WITH back AS (
        DELETE FROM tidemark.rewound_batch WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.batch (batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped,
                                retried, failed, unaccounted, sink_rows, deleted, whole_batch_id, validation_id, committed_at, head_of, drained,
                                began_at) OVERRIDING SYSTEM VALUE
    SELECT batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried,
           failed, unaccounted, sink_rows, deleted, whole_batch_id, validation_id, committed_at, head_of, drained, began_at FROM back;
    -- Where failed records were published no longer counts, because drains have passed that point: they are published again.
    WITH back AS (
        DELETE FROM tidemark.rewound_failed_record WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.failed_record (failed_record_id, group_id, topic_id, partition, record_offset, record_timestamp, key, value, headers,
                                        disposition, error_type, error_text, retry_number, attempt_id, created_at, state, due_at, retry_topic,
                                        publish_error, story, sink_rows, changed_at, ladder_at, redrives, action_id, tried_at, tried_late,
                                        emptied_at) OVERRIDING SYSTEM VALUE
    SELECT failed_record_id, group_id, topic_id, partition, record_offset, record_timestamp, key, value, headers,
           disposition, error_type, error_text, retry_number, attempt_id, created_at, state, due_at, retry_topic,
           publish_error, story, sink_rows, changed_at, ladder_at, redrives, action_id, tried_at, tried_late, emptied_at FROM back;
    WITH back AS (
        DELETE FROM tidemark.rewound_lost_range WHERE rewound_by = undone RETURNING *
    )
    INSERT INTO tidemark.lost_range (lost_range_id, group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at,
                                     rewind_id, head_of) OVERRIDING SYSTEM VALUE
    SELECT lost_range_id, group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at, rewind_id, head_of FROM back;
END
$$;

-- The swap of a replay beside: what the side group has read is from now on what the group has read.
CREATE FUNCTION tidemark.take_over_side(applied bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tidemark.rewind WHERE rewind_id = applied AND state = 'BESIDE') THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s has no replay beside.', applied);
    END IF;
    UPDATE tidemark.validation SET group_id = grp.group_id FROM tidemark.rewind_group grp
     WHERE grp.rewind_id = applied AND validation.group_id = grp.side_id;
    UPDATE tidemark.batch SET group_id = grp.group_id FROM tidemark.rewind_group grp
     WHERE grp.rewind_id = applied AND batch.group_id = grp.side_id;
    UPDATE tidemark.failed_record SET group_id = grp.group_id FROM tidemark.rewind_group grp
     WHERE grp.rewind_id = applied AND failed_record.group_id = grp.side_id;
    UPDATE tidemark.lost_range SET group_id = grp.group_id FROM tidemark.rewind_group grp
     WHERE grp.rewind_id = applied AND lost_range.group_id = grp.side_id;
END
$$;

-- Removes what a side group has read, before its swap.
CREATE FUNCTION tidemark.discard_side(discarded bigint) RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tidemark.rewind WHERE rewind_id = discarded AND state = 'BESIDE') THEN
        RAISE insufficient_privilege USING MESSAGE = 'permission denied for table batch',
            DETAIL = format('Rewind %s has no replay beside.', discarded);
    END IF;
    DELETE FROM tidemark.batch USING tidemark.rewind_group grp WHERE grp.rewind_id = discarded AND batch.group_id = grp.side_id;
    DELETE FROM tidemark.failed_record USING tidemark.rewind_group grp
     WHERE grp.rewind_id = discarded AND failed_record.group_id = grp.side_id;
    DELETE FROM tidemark.lost_range USING tidemark.rewind_group grp WHERE grp.rewind_id = discarded AND lost_range.group_id = grp.side_id;
    DELETE FROM tidemark.validation USING tidemark.rewind_group grp WHERE grp.rewind_id = discarded AND validation.group_id = grp.side_id;
END
$$;
REVOKE EXECUTE ON FUNCTION tidemark.take_from_ledger(bigint), tidemark.put_back_in_ledger(bigint), tidemark.take_over_side(bigint),
                           tidemark.discard_side(bigint) FROM PUBLIC;
