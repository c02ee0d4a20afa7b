-- Retries: what becomes of a record that was not loaded. `disposition` stays what the record's first reading said; `state` is what is so now.

ALTER TABLE tidemark.failed_record
    ADD COLUMN state         text        NOT NULL DEFAULT 'FAILED' CHECK (state IN ('WAITING', 'FAILED', 'LOADED', 'SKIPPED', 'DISCARDED')),
    ADD COLUMN due_at        timestamptz,                        -- of a waiting one: not to be tried before
    ADD COLUMN hop_topic     text,                               -- the topic of its delay, or the failed topic; null: it has no ladder
    ADD COLUMN hop_topic_id  smallint REFERENCES tidemark.topic, -- where the relay has published it; null: not yet
    ADD COLUMN hop_partition integer,
    ADD COLUMN hop_offset    bigint,
    ADD COLUMN publish_error text,                               -- why it never will be
    ADD COLUMN story         jsonb       NOT NULL DEFAULT '[]',  -- earlier tries: [{"number", "type", "text", "attempt_id", "at"}]
    ADD COLUMN sink_rows     integer     NOT NULL DEFAULT 0 CHECK (sink_rows >= 0), -- that it made when it was loaded after all
    ADD COLUMN changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ADD COLUMN ladder_at     timestamptz NOT NULL DEFAULT clock_timestamp(), -- when its ladder began: hand-off or last redrive; the budget counts from here
    ADD COLUMN redrives      integer     NOT NULL DEFAULT 0 CHECK (redrives >= 0), -- how often an operator sent it round again
    ADD COLUMN action_id     bigint,                             -- what an operator did with it last (0010_redrive.sql)
    ADD CHECK ((state = 'WAITING') = (due_at IS NOT NULL)),
    ADD CHECK ((hop_offset IS NULL) = (hop_topic_id IS NULL) AND (hop_offset IS NULL) = (hop_partition IS NULL)),
    ADD CHECK (sink_rows = 0 OR state = 'LOADED');
UPDATE tidemark.failed_record SET ladder_at = created_at, changed_at = created_at;
-- Only a message that stands here is ever tried: what anybody else writes into a retry topic, and what a relay published twice, is not.
CREATE UNIQUE INDEX failed_record_hop ON tidemark.failed_record (hop_topic_id, hop_partition, hop_offset) WHERE hop_offset IS NOT NULL;
CREATE INDEX failed_record_outbox ON tidemark.failed_record (group_id, failed_record_id)
    WHERE hop_offset IS NULL AND hop_topic IS NOT NULL AND publish_error IS NULL AND state IN ('WAITING', 'FAILED');
CREATE INDEX failed_record_due ON tidemark.failed_record (group_id, due_at) WHERE state = 'WAITING';

-- As the columns of failed_record, in their order.
ALTER TABLE tidemark.rewound_failed_record
    ADD COLUMN state         text,
    ADD COLUMN due_at        timestamptz,
    ADD COLUMN hop_topic     text,
    ADD COLUMN hop_topic_id  smallint,
    ADD COLUMN hop_partition integer,
    ADD COLUMN hop_offset    bigint,
    ADD COLUMN publish_error text,
    ADD COLUMN story         jsonb,
    ADD COLUMN sink_rows     integer,
    ADD COLUMN changed_at    timestamptz,
    ADD COLUMN ladder_at     timestamptz,
    ADD COLUMN redrives      integer,
    ADD COLUMN action_id     bigint;
UPDATE tidemark.rewound_failed_record
   SET state = 'FAILED', story = '[]', sink_rows = 0, changed_at = created_at, ladder_at = created_at, redrives = 0;

-- A slice of a retry topic: its records are those of other slices, tried again, and its rows have their lineage.
ALTER TABLE tidemark.batch ADD COLUMN drained boolean NOT NULL DEFAULT false;
ALTER TABLE tidemark.rewound_batch ADD COLUMN drained boolean;
UPDATE tidemark.rewound_batch SET drained = false;

-- The position of a retry topic, which only drains move: no run of the consumer reads it, no rewind moves it.
ALTER TABLE tidemark.partition_offset ADD COLUMN drained boolean NOT NULL DEFAULT false;
