-- Consumers with several tables: `sink` then lists them all, for people and for the audit, and `sinks` has them one by one.
ALTER TABLE tidemark.rewind_group ADD COLUMN sinks text[]; -- null: only `sink`
ALTER TABLE tidemark.undo_floor ADD COLUMN sinks text[]; -- likewise
CREATE INDEX undo_floor_place ON tidemark.undo_floor (topic_id, partition);
