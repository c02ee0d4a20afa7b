-- Records that were not loaded, with all that is needed to try them again, and what operators do with them. Kept permanently.

-- One row per action of an operator: who, when, why, and on how many records. A redrive has one for each time that it was started.
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

-- A record that was not loaded. `disposition` stays what its first reading decided; `state` is the current one. A held record has not been
-- tried: with `order: key`, it waits behind an earlier one of its key. Foreign keys to topics, attempts and positions could never fail, and
-- would be looked up for each record.
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
    attempt_id       bigint      NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    state            text        NOT NULL DEFAULT 'FAILED' CHECK (state IN ('WAITING', 'HELD', 'FAILED', 'LOADED', 'SKIPPED', 'DISCARDED')),
    due_at           timestamptz, -- of a waiting one: not to be tried before
    retry_topic        text,        -- the topic of its delay, or the failed topic; null: it has no ladder
    retry_topic_id     smallint,    -- where the relay has published it; null: not yet
    retry_partition    integer,
    retry_offset       bigint,
    publish_error    text,        -- why it never will be
    story            jsonb       NOT NULL DEFAULT '[]', -- earlier tries: [{"number", "type", "text", "attempt_id", "at"}]
    sink_rows        integer     NOT NULL DEFAULT 0 CHECK (sink_rows >= 0), -- that it made when it was loaded after all
    changed_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ladder_at        timestamptz NOT NULL DEFAULT clock_timestamp(), -- when its ladder began: hand-off or last redrive; the budget counts from here
    redrives         integer     NOT NULL DEFAULT 0 CHECK (redrives >= 0),
    action_id        bigint REFERENCES tidemark.retry_action, -- what an operator did with it last
    tried_at         timestamptz, -- its last retry; null: there was none
    tried_late       real,        -- so many seconds after it was due
    emptied_at       timestamptz, -- key, value and headers were taken out of the settled record; null: they are there
    UNIQUE (group_id, topic_id, partition, record_offset),
    CHECK ((state = 'WAITING') = (due_at IS NOT NULL)),
    CHECK ((retry_offset IS NULL) = (retry_topic_id IS NULL) AND (retry_offset IS NULL) = (retry_partition IS NULL)),
    CHECK (sink_rows = 0 OR state = 'LOADED'),
    CHECK (state <> 'HELD' OR (key IS NOT NULL AND retry_topic IS NULL AND retry_offset IS NULL)),
    CHECK ((tried_at IS NULL) = (tried_late IS NULL)),
    CHECK (emptied_at IS NULL
           OR (state IN ('LOADED', 'SKIPPED', 'DISCARDED') AND key IS NULL AND value IS NULL AND headers::text = '[]'))
);
-- Only a message that stands here is ever tried: what anybody else writes into a retry topic, and what a relay published twice, is not.
CREATE UNIQUE INDEX failed_record_message ON tidemark.failed_record (retry_topic_id, retry_partition, retry_offset) WHERE retry_offset IS NOT NULL;
CREATE INDEX failed_record_outbox ON tidemark.failed_record (group_id, failed_record_id)
    WHERE retry_offset IS NULL AND retry_topic IS NOT NULL AND publish_error IS NULL AND state IN ('WAITING', 'FAILED');
CREATE INDEX failed_record_held ON tidemark.failed_record (group_id, topic_id, partition, record_offset) WHERE state = 'HELD';
-- What was tried since when: how late the last day's tries were, and what a drain has loaded.
CREATE INDEX failed_record_tried ON tidemark.failed_record (group_id, tried_at) WHERE tried_at IS NOT NULL;
-- What is due, and the list of all retries, which need not read the records themselves.
CREATE INDEX failed_record_unsettled ON tidemark.failed_record (group_id, state, due_at) INCLUDE (error_type, created_at, failed_record_id)
 WHERE state IN ('WAITING', 'HELD', 'FAILED');
-- Counts a group's failed records without reading those that are settled.
CREATE INDEX failed_record_failed ON tidemark.failed_record (group_id) WHERE state = 'FAILED';
-- Counts the records of a group that have failed lately, without reading the others.
CREATE INDEX failed_record_lately ON tidemark.failed_record (group_id, created_at);
-- Settled records that still have their payloads, by when they were settled.
CREATE INDEX failed_record_full ON tidemark.failed_record (changed_at)
 WHERE emptied_at IS NULL AND state IN ('LOADED', 'SKIPPED', 'DISCARDED');

-- A record as it was before an edit. The record itself has the current payload; the first edit's row has what Kafka had.
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
    dag_id       text,
    run_id       text,
    approved_by  text CHECK (approved_by <> ''), -- null: nobody was asked
    digest       text NOT NULL, -- of the settings and the records, see redrive_digest
    CHECK ((state = 'PLANNED') = (started_at IS NULL)),
    CHECK ((state = 'DONE') = (ended_at IS NOT NULL))
);
CREATE INDEX redrive_group ON tidemark.redrive (group_id, redrive_id);
CREATE INDEX redrive_run ON tidemark.redrive (dag_id, run_id) WHERE dag_id IS NOT NULL;

-- The records of a redrive, and their outcome.
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

-- A hash of the settings and the records of a redrive, as stored. `records` is in ascending order.
CREATE FUNCTION tidemark.redrive_digest(consumer text, destination text, filter jsonb, per_second integer, max_redrives integer, records bigint[])
RETURNS text LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT encode(sha256(convert_to(jsonb_build_array(consumer, destination, filter, per_second, max_redrives)::text
                                    || array_to_string(records, ','), 'UTF8')), 'hex')
$$;
