-- Records that were not loaded, with all that is needed to try them again.

CREATE TABLE tidemark.failed_record (
    failed_record_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id         integer     NOT NULL,
    topic_id         smallint    NOT NULL,
    partition        integer     NOT NULL,
    record_offset    bigint      NOT NULL,
    record_timestamp timestamptz,                                                        -- null: the record carries none
    key              bytea,
    value            bytea,
    headers          json        NOT NULL, -- [[name, value in base64 or null]], in order; json and not jsonb: names may hold U+0000
    disposition      text        NOT NULL CHECK (disposition IN ('retry', 'fail')),
    error_type       text        NOT NULL,
    error_text       text        NOT NULL,
    retry_number     integer     NOT NULL DEFAULT 0 CHECK (retry_number >= 0),
    attempt_id       bigint      NOT NULL REFERENCES tidemark.attempt,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (group_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    UNIQUE (group_id, topic_id, partition, record_offset)
);
