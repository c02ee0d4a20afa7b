-- Order by key: while a record waits, later ones of its key are held. They are no failures and have not been tried.

ALTER TABLE tidemark.failed_record
    DROP CONSTRAINT failed_record_state_check,
    ADD CONSTRAINT failed_record_state_check CHECK (state IN ('WAITING', 'HELD', 'FAILED', 'LOADED', 'SKIPPED', 'DISCARDED')),
    ADD CHECK (state <> 'HELD' OR (key IS NOT NULL AND hop_topic IS NULL AND hop_offset IS NULL));
CREATE INDEX failed_record_held ON tidemark.failed_record (group_id, topic_id, partition, record_offset) WHERE state = 'HELD';
