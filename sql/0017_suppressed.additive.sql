-- What later commits must not load again: records whose rows were erased completely, and keys of upsert sinks.

CREATE TABLE tidemark.suppressed (
    group_id      integer  NOT NULL REFERENCES tidemark.consumer_group,
    topic_id      smallint NOT NULL REFERENCES tidemark.topic,
    partition     integer  NOT NULL,
    record_offset bigint   NOT NULL,
    erasure_id    bigint   NOT NULL REFERENCES tidemark.erasure,
    PRIMARY KEY (group_id, topic_id, partition, record_offset)
);

-- Rows of these keys are not loaded from records below the bound: the group had loaded the erased row, or a later one, from the partition.
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

ALTER TABLE tidemark.erasure
    ADD COLUMN suppressed     bigint NOT NULL DEFAULT 0 CHECK (suppressed >= 0),     -- as planned, then as stored
    ADD COLUMN not_suppressed bigint NOT NULL DEFAULT 0 CHECK (not_suppressed >= 0); -- records found whose rows a replay makes again
