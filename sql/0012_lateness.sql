-- How late records were tried, and payloads that nobody needs any more.

ALTER TABLE tidemark.failed_record
    ADD COLUMN tried_at   timestamptz, -- the last retry of it; null: there was none
    ADD COLUMN tried_late real,        -- so many seconds after it was due
    ADD COLUMN emptied_at timestamptz, -- key, value and headers were taken out of the settled record; null: they are there
    ADD CHECK ((tried_at IS NULL) = (tried_late IS NULL)),
    ADD CHECK (emptied_at IS NULL
               OR (state IN ('LOADED', 'SKIPPED', 'DISCARDED') AND key IS NULL AND value IS NULL AND headers::text = '[]'));

-- What was tried since when: how late the last day's tries were, and what a drain has loaded.
CREATE INDEX failed_record_tried ON tidemark.failed_record (group_id, tried_at) WHERE tried_at IS NOT NULL;

-- As the columns of failed_record, in their order.
ALTER TABLE tidemark.rewound_failed_record
    ADD COLUMN tried_at   timestamptz,
    ADD COLUMN tried_late real,
    ADD COLUMN emptied_at timestamptz;
