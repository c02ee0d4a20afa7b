-- Which verdicts have been announced by an asset event, and the offsets that they cover: a later run announces what an earlier one could not.
-- What is older than this migration counts as announced.
ALTER TABLE tidemark.validation
    ADD COLUMN ranges jsonb,
    ADD COLUMN announced_at timestamptz DEFAULT '1970-01-01Z';
ALTER TABLE tidemark.validation ALTER COLUMN announced_at DROP DEFAULT;
CREATE INDEX validation_to_announce ON tidemark.validation (group_id) WHERE announced_at IS NULL;
ALTER TABLE tidemark.validation
    DROP CONSTRAINT times,
    ADD CONSTRAINT times CHECK (least(validated_at, announced_at) >= '1970-01-01Z'::timestamptz
                                AND greatest(validated_at, announced_at) < '9999-01-01Z'::timestamptz) NOT VALID;
