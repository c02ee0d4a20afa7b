-- Who had a partition last, beyond the process that did: a task of Airflow's keeps its partitions from one run to the next.
ALTER TABLE tidemark.partition_offset ADD COLUMN seat text; -- the instance id of the member that claimed last with something to read

-- What an operator said about a group's reading. Every member looks before each batch.
CREATE TABLE tidemark.flow (
    group_id   integer     NOT NULL REFERENCES tidemark.consumer_group,
    topic      text, -- null: all topics
    partition  integer CHECK (partition >= 0), -- null: all partitions
    paused     boolean     NOT NULL DEFAULT false,
    priority   integer     NOT NULL DEFAULT 0, -- topics of a higher one are read to their ends first
    max_ahead  interval CHECK (max_ahead > interval '0'), -- how far one topic may run ahead of another in event time; null: any
    reason     text        NOT NULL DEFAULT '',
    changed_by text        NOT NULL DEFAULT current_user,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE NULLS NOT DISTINCT (group_id, topic, partition),
    CHECK (topic IS NOT NULL OR partition IS NULL),
    CHECK (priority = 0 OR (topic IS NOT NULL AND partition IS NULL)),
    CHECK (max_ahead IS NULL OR topic IS NULL)
);
