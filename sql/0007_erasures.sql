-- Erasures: a person's rows, removed from a sink and from what is kept of them. Neither the condition nor any of their data is stored.

-- An erasure of rows of one sink: planned, then applied.
CREATE TABLE tidemark.erasure (
    erasure_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id         integer     NOT NULL REFERENCES tidemark.consumer_group,
    consumer         text        NOT NULL,
    sink             text        NOT NULL,
    state            text        NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'APPLIED')),
    salt             bytea       NOT NULL,
    digest           bytea       NOT NULL, -- scrypt of the condition: apply must be given the same one
    sink_rows        bigint      NOT NULL CHECK (sink_rows >= 0), -- as planned, then as removed
    archived_rows    bigint      NOT NULL CHECK (archived_rows >= 0),
    overwritten_rows bigint      NOT NULL CHECK (overwritten_rows >= 0),
    failed_records   bigint      NOT NULL CHECK (failed_records >= 0),
    examples         bigint      NOT NULL CHECK (examples >= 0),
    reason           text        NOT NULL CHECK (length(btrim(reason)) >= 10),
    planned_by       text        NOT NULL CHECK (planned_by <> ''),
    planned_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    applied_by       text CHECK (applied_by <> ''),
    applied_at       timestamptz,
    suppressed       bigint      NOT NULL DEFAULT 0 CHECK (suppressed >= 0),     -- as planned, then as stored
    not_suppressed   bigint      NOT NULL DEFAULT 0 CHECK (not_suppressed >= 0), -- records found whose rows a replay makes again
    CHECK ((state = 'APPLIED') = (applied_at IS NOT NULL)),
    CHECK ((applied_at IS NULL) = (applied_by IS NULL))
);
CREATE INDEX erasure_group ON tidemark.erasure (group_id, erasure_id);

-- Rows of a batch's record that the ledger counts and the sink lacks since. No reference to the batch: a rewind takes it out, and its undo puts
-- it back.
CREATE TABLE tidemark.erased (
    erasure_id    bigint  NOT NULL REFERENCES tidemark.erasure,
    batch_id      bigint  NOT NULL,
    record_offset bigint  NOT NULL,
    rows          bigint  NOT NULL CHECK (rows > 0),
    whole         boolean NOT NULL, -- the record has no row left
    PRIMARY KEY (batch_id, record_offset, erasure_id)
);

-- Records that later commits must not load again, because their rows were erased completely.
CREATE TABLE tidemark.suppressed (
    group_id      integer  NOT NULL REFERENCES tidemark.consumer_group,
    topic_id      smallint NOT NULL REFERENCES tidemark.topic,
    partition     integer  NOT NULL,
    record_offset bigint   NOT NULL,
    erasure_id    bigint   NOT NULL REFERENCES tidemark.erasure,
    PRIMARY KEY (group_id, topic_id, partition, record_offset)
);

-- Keys of upsert sinks. Their rows are not loaded from records below the bound: the group had loaded the erased row, or a later one, from the
-- partition.
CREATE TABLE tidemark.suppressed_key (
    sink       text     NOT NULL,
    topic_id   smallint NOT NULL REFERENCES tidemark.topic,
    partition  integer  NOT NULL,
    digest     bytea    NOT NULL, -- SHA-256 of salt and key; the same salt for all keys of a sink
    salt       bytea    NOT NULL,
    below      bigint   NOT NULL,
    erasure_id bigint   NOT NULL REFERENCES tidemark.erasure,
    PRIMARY KEY (sink, topic_id, partition, digest)
);
CREATE INDEX suppressed_key_below ON tidemark.suppressed_key (sink, topic_id, partition, below);
