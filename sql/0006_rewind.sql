-- Rewinds: plans and what became of them, kept for ever, and what they took out of sinks and ledger.

-- The order in which rewinds were applied. Their ids are in the order of planning.
CREATE SEQUENCE tidemark.rewind_applied AS bigint;

CREATE TABLE tidemark.rewind (
    rewind_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state       text        NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'REJECTED', 'APPLIED', 'UNDONE')),
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
    CHECK (undo_of < rewind_id),
    CHECK ((decided_by IS NULL) = (decided_at IS NULL)),
    CHECK (state <> 'REJECTED' OR decided_by IS NOT NULL),
    CHECK ((state IN ('APPLIED', 'UNDONE')) = (applied_at IS NOT NULL)),
    CHECK ((applied_at IS NULL) = (applied_by IS NULL) AND (applied_at IS NULL) = (applied_no IS NULL))
);

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
    told          text[]  NOT NULL, -- assets
    PRIMARY KEY (rewind_id, group_id)
);
CREATE INDEX rewind_group_group ON tidemark.rewind_group (group_id, rewind_id);

-- The before-image of each partition, and where it went. Until the rewind is applied, old_offset and what else is only known then is null.
CREATE TABLE tidemark.rewind_partition (
    rewind_id              bigint   NOT NULL,
    group_id               integer  NOT NULL,
    topic_id               smallint NOT NULL REFERENCES tidemark.topic,
    partition              integer  NOT NULL,
    hold                   boolean  NOT NULL, -- stays where the group is: its epoch is raised, and nothing else
    target                 bigint   NOT NULL CHECK (target >= 0), -- what the scenario comes to
    planned_offset         bigint   NOT NULL, -- where the group was when the plan was made
    new_offset             bigint   NOT NULL, -- greater than the target only where the log begins behind it
    superseded_from        bigint   NOT NULL, -- from here on the ledger is another one; rows and failed records go
    planned_sink_rows      bigint   NOT NULL DEFAULT 0,
    planned_failed_records bigint   NOT NULL DEFAULT 0,
    old_offset             bigint,
    old_validated_offset   bigint,
    owner_epoch            bigint, -- the one that it was raised to
    sink_rows              bigint,
    failed_records         bigint,
    PRIMARY KEY (rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id) REFERENCES tidemark.rewind_group,
    CHECK (new_offset >= target OR hold),
    CHECK (superseded_from <= new_offset)
);
CREATE INDEX rewind_partition_partition ON tidemark.rewind_partition (group_id, topic_id, partition);

-- The tables that hold superseded rows, with the columns of their sink: tidemark.rewound_<rewind_id>_<number>.
CREATE TABLE tidemark.rewind_archive (
    rewind_id       bigint      NOT NULL,
    number          integer     NOT NULL CHECK (number > 0),
    group_id        integer     NOT NULL,
    sink            text        NOT NULL,
    relation        text        NOT NULL UNIQUE,
    table_partition boolean     NOT NULL, -- was a partition of the sink
    rows            bigint      NOT NULL CHECK (rows > 0),
    put_back_at     timestamptz, -- by an undo: its rows are in the sink again, the table is gone
    removed_at      timestamptz, -- its time was over: the table is gone, and the rewind cannot be undone any more
    PRIMARY KEY (rewind_id, number),
    FOREIGN KEY (rewind_id, group_id) REFERENCES tidemark.rewind_group
);

-- A rewind into the middle of a batch leaves its head; the whole one is in rewound_batch.
ALTER TABLE tidemark.batch ADD COLUMN head_of bigint;
CREATE INDEX batch_head_of ON tidemark.batch (head_of) WHERE head_of IS NOT NULL;
-- Deleting batches looks for those that are anchored on them.
CREATE INDEX batch_anchor ON tidemark.batch (anchor_id) WHERE anchor_id IS NOT NULL;

-- A rewind forward leaves a range that nobody has read; one that was allowed to go where the log has no records any more, likewise.
ALTER TABLE tidemark.lost_range
    ALTER COLUMN attempt_id DROP NOT NULL,
    ADD COLUMN rewind_id bigint REFERENCES tidemark.rewind,
    ADD COLUMN head_of bigint,
    DROP CONSTRAINT lost_range_reason_check,
    ADD CONSTRAINT lost_range_reason_check CHECK (reason IN ('retention', 'topic re-created', 'reset to latest', 'rewind')),
    ADD CHECK ((attempt_id IS NULL) <> (rewind_id IS NULL));
CREATE INDEX lost_range_head_of ON tidemark.lost_range (head_of) WHERE head_of IS NOT NULL;

-- What rewinds took out of the ledger, as it was: a column that batch, failed_record or lost_range gets is to be added here too.
CREATE TABLE tidemark.rewound_batch (
    rewound_by bigint NOT NULL REFERENCES tidemark.rewind,
    LIKE tidemark.batch,
    PRIMARY KEY (rewound_by, batch_id)
);
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
