-- What operators do with records that were not loaded: discard, edit, send round again. Kept for ever.

-- One row an action: who, when, why, and on how many records. A redrive has one for each time that it was started.
CREATE TABLE tidemark.retry_action (
    action_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id  integer     NOT NULL REFERENCES tidemark.consumer_group,
    kind      text        NOT NULL CHECK (kind IN ('DISCARD', 'EDIT', 'REDRIVE', 'STOP')),
    filter    jsonb       NOT NULL, -- which records were meant, as it was asked for
    reason    text        NOT NULL CHECK (length(btrim(reason)) >= 10),
    done_by   text        NOT NULL CHECK (done_by <> ''),
    done_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    records   bigint      NOT NULL CHECK (records >= 0)
);
CREATE INDEX retry_action_group ON tidemark.retry_action (group_id, action_id);
ALTER TABLE tidemark.failed_record ADD FOREIGN KEY (action_id) REFERENCES tidemark.retry_action;

-- What a record was before an edit. The record itself has what it is now; the first edit's row has what Kafka had.
CREATE TABLE tidemark.failed_record_edit (
    action_id        bigint NOT NULL REFERENCES tidemark.retry_action,
    failed_record_id bigint NOT NULL, -- no reference: a rewind takes the record out, and its undo puts it back
    key              bytea,
    value            bytea,
    headers          json   NOT NULL,
    PRIMARY KEY (action_id, failed_record_id)
);
CREATE INDEX failed_record_edit_record ON tidemark.failed_record_edit (failed_record_id, action_id);

-- A redrive is planned first: its records are chosen then, once and for all.
CREATE TABLE tidemark.redrive (
    redrive_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     integer     NOT NULL REFERENCES tidemark.consumer_group,
    consumer     text        NOT NULL,
    state        text        NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'RUNNING', 'STOPPED', 'DONE')),
    destination  text        NOT NULL CHECK (destination IN ('ladder', 'now')),
    filter       jsonb       NOT NULL,
    per_second   integer CHECK (per_second > 0), -- records at most; null: as fast as it goes
    max_redrives integer     NOT NULL CHECK (max_redrives > 0), -- a record that was sent round so often already stays where it is
    reason       text        NOT NULL CHECK (length(btrim(reason)) >= 10),
    planned_by   text        NOT NULL CHECK (planned_by <> ''),
    planned_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at   timestamptz,
    ended_at     timestamptz, -- null while records are left
    CHECK ((state = 'PLANNED') = (started_at IS NULL)),
    CHECK ((state = 'DONE') = (ended_at IS NOT NULL))
);
CREATE INDEX redrive_group ON tidemark.redrive (group_id, redrive_id);

CREATE TABLE tidemark.redrive_record (
    redrive_id       bigint  NOT NULL REFERENCES tidemark.redrive,
    failed_record_id bigint  NOT NULL, -- no reference, as above
    state            text    NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'REDRIVEN', 'PASSED OVER')),
    why              text,   -- it was passed over
    action_id        bigint REFERENCES tidemark.retry_action, -- by which it was redriven
    done_at          timestamptz,
    PRIMARY KEY (redrive_id, failed_record_id),
    CHECK ((state = 'PASSED OVER') = (why IS NOT NULL)),
    CHECK ((state = 'PLANNED') = (done_at IS NULL))
);
CREATE INDEX redrive_record_planned ON tidemark.redrive_record (redrive_id, failed_record_id) WHERE state = 'PLANNED';
CREATE INDEX redrive_record_record ON tidemark.redrive_record (failed_record_id);
