-- Since when a partition's last stable offset has not moved though records are after it: a transaction that stays open holds up everybody.

ALTER TABLE tidemark.lag_partition ADD COLUMN open_since timestamptz;
ALTER TABLE tidemark.lag_group ADD COLUMN open_for interval;

-- As for all times since migration 0035.
ALTER TABLE tidemark.lag_partition DROP CONSTRAINT times, ADD CONSTRAINT times CHECK (
    least(sampled_at, committed_at, base_at, mid_at, open_since) >= timestamptz '1970-01-01Z'
    AND greatest(sampled_at, committed_at, base_at, mid_at, open_since) < timestamptz '9999-01-01Z') NOT VALID;
ALTER TABLE tidemark.lag_group ADD CONSTRAINT lengths CHECK (open_for >= interval '0' AND open_for < interval '999999999 days') NOT VALID;

-- A topic that a pattern matched and that is gone from Kafka.
ALTER TABLE tidemark.lost_range DROP CONSTRAINT lost_range_reason_check,
    ADD CONSTRAINT lost_range_reason_check
        CHECK (reason IN ('retention', 'topic re-created', 'topic deleted', 'reset to latest', 'rewind')) NOT VALID;
