-- Positions, the fence and the ledger. The schema itself is made by `tidemark migrate` before the first migration.

-- Generations are handed out for ever: a number that was given once is never given again, whatever happens to its group.
CREATE SEQUENCE tidemark.generation AS bigint;

-- A topic as Kafka identifies it. A topic that was deleted and created again has a new UUID and so a new row: its offsets
-- start over and must not meet the lineage of the old one.
CREATE TABLE tidemark.topic (
    topic_id   smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL,
    kafka_uuid text        NOT NULL,
    first_seen timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (name, kafka_uuid)
);

CREATE TABLE tidemark.consumer_group (
    group_id   integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL UNIQUE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row a partition: the position, and who may move it. Every commit is a compare-and-set on this row.
CREATE TABLE tidemark.partition_offset (
    group_id         integer     NOT NULL REFERENCES tidemark.consumer_group,
    topic_id         smallint    NOT NULL REFERENCES tidemark.topic,
    partition        integer     NOT NULL CHECK (partition >= 0),
    next_offset      bigint      NOT NULL CHECK (next_offset >= 0),
    generation       bigint      NOT NULL DEFAULT 0,
    owner            text,
    owner_epoch      bigint      NOT NULL DEFAULT 0 CHECK (owner_epoch >= 0),
    validated_offset bigint      NOT NULL CHECK (validated_offset >= 0),
    committed_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, topic_id, partition),
    CHECK (validated_offset <= next_offset)
) WITH (fillfactor = 50); -- updated once a batch: room for heap-only updates

-- One try to run a consumer: written before the driver starts, so that there is no run that nobody knows of.
CREATE TABLE tidemark.attempt (
    attempt_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     integer     NOT NULL REFERENCES tidemark.consumer_group,
    dag_id       text,
    run_id       text,
    task_id      text,
    map_index    integer,
    try_number   integer,
    state        text        NOT NULL DEFAULT 'RUNNING' CHECK (state IN ('RUNNING', 'COMMITTED', 'FAILED')),
    planned      jsonb, -- [{"topic", "topic_id", "partition", "start", "end"}]: the run is bounded by these ends
    error        jsonb, -- {"kind", "type", "text"}
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    CHECK ((state = 'RUNNING') = (ended_at IS NULL)),
    CHECK ((state = 'FAILED') = (error IS NOT NULL))
);
CREATE INDEX attempt_task ON tidemark.attempt (dag_id, run_id, task_id, map_index);
CREATE INDEX attempt_group ON tidemark.attempt (group_id, attempt_id);

-- The ledger: one row a slice that was committed, in the same transaction as its rows.
CREATE TABLE tidemark.batch (
    batch_id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id        integer     NOT NULL,
    topic_id        smallint    NOT NULL,
    partition       integer     NOT NULL,
    start_offset    bigint      NOT NULL,
    end_offset      bigint      NOT NULL,
    owner_epoch     bigint      NOT NULL,
    attempt_id      bigint      NOT NULL REFERENCES tidemark.attempt,
    loaded          bigint      NOT NULL CHECK (loaded >= 0),
    skipped         bigint      NOT NULL CHECK (skipped >= 0),
    retried         bigint      NOT NULL CHECK (retried >= 0),
    failed          bigint      NOT NULL CHECK (failed >= 0),
    unaccounted     bigint      NOT NULL CHECK (unaccounted >= 0), -- compaction, transaction markers, rows filtered away
    sink_rows       bigint      NOT NULL CHECK (sink_rows >= loaded),
    -- Null: each row has its record's lineage. Otherwise no single record explains the rows: they have the start of this batch as their
    -- lineage, and belong to all batches with this anchor, which can only be taken back together.
    anchor_id       bigint REFERENCES tidemark.batch,
    validation_id   bigint,
    committed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    UNIQUE (group_id, topic_id, partition, start_offset),
    CHECK (end_offset > start_offset),
    CHECK (loaded + skipped + retried + failed + unaccounted = end_offset - start_offset)
);
CREATE INDEX batch_attempt ON tidemark.batch (attempt_id);

-- Ranges that retention or a re-created topic took away before they were read, and that the user allowed to be lost.
CREATE TABLE tidemark.lost_range (
    lost_range_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      integer     NOT NULL,
    topic_id      smallint    NOT NULL,
    partition     integer     NOT NULL,
    start_offset  bigint      NOT NULL,
    end_offset    bigint, -- null: unknown, the topic is gone
    reason        text        NOT NULL CHECK (reason IN ('retention', 'topic re-created', 'reset to latest')),
    attempt_id    bigint      NOT NULL REFERENCES tidemark.attempt,
    recorded_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    UNIQUE (group_id, topic_id, partition, start_offset),
    CHECK (end_offset > start_offset)
);
