-- Positions, the fence and the ledger.

-- One row per partition: the position, and who may move it. Every commit is a compare-and-set on this row.
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
    instance_id             text,        -- the instance id of the member that claimed last with something to read
    drained          boolean     NOT NULL DEFAULT false, -- the position of a retry topic, which only drains move
    -- Kafka's leader epoch in which the log reached up to next_offset (KIP-320); null: unknown, for a position that nobody has read up to. A log
    -- that was truncated and grew again has other records at the same offsets.
    leader_epoch     integer CHECK (leader_epoch >= 0),
    PRIMARY KEY (group_id, topic_id, partition),
    CHECK (validated_offset <= next_offset)
) WITH (fillfactor = 50); -- updated once a batch: room for heap-only updates

-- One try to run a consumer: written before the driver starts, so that there is no run that nobody knows of.
CREATE TABLE tidemark.attempt (
    attempt_id    bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      integer     NOT NULL REFERENCES tidemark.consumer_group,
    dag_id        text,
    run_id        text,
    task_id       text,
    map_index     integer,
    try_number    integer,
    state         text        NOT NULL DEFAULT 'RUNNING' CHECK (state IN ('RUNNING', 'COMMITTED', 'FAILED')),
    planned       jsonb, -- [{"topic", "topic_id", "partition", "start", "end"}]: the run is bounded by these ends
    error         jsonb, -- {"kind", "type", "text"}
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at      timestamptz,
    of_rewind     bigint, -- reads for this rewind (references tidemark.rewind) what it has skipped, or its replay beside; null: the group's own records
    columns_added jsonb, -- [{"table", "columns": ["name type"]}]; null: none
    -- {"master", "name", "id", "staging", "url", "driver_at"}: the driver runs on a cluster, since driver_at.
    -- null: beside the task that started it
    application   jsonb,
    CHECK ((state = 'RUNNING') = (ended_at IS NULL)),
    CHECK ((state = 'FAILED') = (error IS NOT NULL))
);
CREATE INDEX attempt_task ON tidemark.attempt (dag_id, run_id, task_id, map_index);
CREATE INDEX attempt_group ON tidemark.attempt (group_id, attempt_id);
CREATE INDEX attempt_running ON tidemark.attempt (group_id) WHERE state = 'RUNNING';
CREATE INDEX attempt_ended ON tidemark.attempt (ended_at) WHERE ended_at IS NOT NULL;

-- The ledger: one row per committed slice, in the same transaction as its rows.
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
    whole_batch_id       bigint REFERENCES tidemark.batch,
    validation_id   bigint, -- which has judged it (references tidemark.validation); null: none yet
    committed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    head_of         bigint, -- what a rewind into the middle of a batch has left of it; the whole one is in rewound_batch
    -- A slice of a retry topic: its records are those of other slices, tried again, and its rows have their lineage.
    drained         boolean     NOT NULL DEFAULT false,
    began_at        timestamptz DEFAULT transaction_timestamp(), -- when the commit began
    deleted         bigint      NOT NULL DEFAULT 0 CHECK (deleted >= 0), -- how many of sink_rows are deletions
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    UNIQUE (group_id, topic_id, partition, start_offset),
    CHECK (end_offset > start_offset),
    CHECK (loaded + skipped + retried + failed + unaccounted = end_offset - start_offset)
);
CREATE INDEX batch_attempt ON tidemark.batch (attempt_id);
CREATE INDEX batch_validation ON tidemark.batch (validation_id);
CREATE INDEX batch_head_of ON tidemark.batch (head_of) WHERE head_of IS NOT NULL;
-- Deleting batches looks for those that are anchored on them.
CREATE INDEX batch_whole_batch ON tidemark.batch (whole_batch_id) WHERE whole_batch_id IS NOT NULL;

-- Ranges that nobody has read and nobody can or will: retention or a re-created topic took them away and the user allowed it, or a rewind
-- skipped them.
CREATE TABLE tidemark.lost_range (
    lost_range_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      integer     NOT NULL,
    topic_id      smallint    NOT NULL,
    partition     integer     NOT NULL,
    start_offset  bigint      NOT NULL,
    end_offset    bigint, -- null: unknown, the topic is gone
    reason        text        NOT NULL CHECK (reason IN ('retention', 'topic re-created', 'topic deleted', 'reset to latest', 'rewind')),
    attempt_id    bigint REFERENCES tidemark.attempt,
    recorded_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    rewind_id     bigint, -- a rewind forward that has skipped the range (references tidemark.rewind)
    head_of       bigint,
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    UNIQUE (group_id, topic_id, partition, start_offset),
    CHECK (end_offset > start_offset),
    CHECK ((attempt_id IS NULL) <> (rewind_id IS NULL))
);
-- What an attempt has lost, which is looked up at its end.
CREATE INDEX lost_range_attempt ON tidemark.lost_range (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX lost_range_head_of ON tidemark.lost_range (head_of) WHERE head_of IS NOT NULL;
