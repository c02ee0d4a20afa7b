-- Backfills: ranges that a rewind forward has skipped, and that a run of their own reads later into the same sink.

-- Whether what the rewind skips is to be read later.
ALTER TABLE tidemark.rewind ADD COLUMN backfill boolean NOT NULL DEFAULT false;

-- A group without members whose positions say how far a backfill has come; all else that the backfill makes is the group's that it is of.
-- It is stored as Dead, and under a name that no group can have, so that nobody joins, lists or deletes it.
ALTER TABLE tidemark.consumer_group
    ADD COLUMN side_of integer REFERENCES tidemark.consumer_group,
    ADD CHECK (side_of IS NULL OR state = 'Dead');
CREATE INDEX consumer_group_side_of ON tidemark.consumer_group (side_of) WHERE side_of IS NOT NULL;

-- An attempt that reads what this rewind has skipped; null: the group's own records.
ALTER TABLE tidemark.attempt ADD COLUMN backfill_of bigint REFERENCES tidemark.rewind;

-- What a rewind has skipped of a partition, [start_offset, end_offset). How far it has been read is the position of the side group.
CREATE TABLE tidemark.backfill (
    rewind_id    bigint   NOT NULL,
    group_id     integer  NOT NULL,
    topic_id     smallint NOT NULL,
    partition    integer  NOT NULL,
    side_id      integer  NOT NULL REFERENCES tidemark.consumer_group, -- the side group
    start_offset bigint   NOT NULL,
    end_offset   bigint   NOT NULL, -- nearer once a rewind has gone back into the range: from there on the group reads it itself
    PRIMARY KEY (rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id, topic_id, partition) REFERENCES tidemark.rewind_partition,
    FOREIGN KEY (side_id, topic_id, partition) REFERENCES tidemark.partition_offset,
    CHECK (end_offset >= start_offset)
);
CREATE INDEX backfill_partition ON tidemark.backfill (group_id, topic_id, partition);

-- Which rewind has drawn a backfill's end nearer, and from where: its undo gives that back.
CREATE TABLE tidemark.backfill_cut (
    cut_by        bigint   NOT NULL REFERENCES tidemark.rewind,
    rewind_id     bigint   NOT NULL,
    group_id      integer  NOT NULL,
    topic_id      smallint NOT NULL,
    partition     integer  NOT NULL,
    end_offset    bigint   NOT NULL,
    given_back_by bigint REFERENCES tidemark.rewind,
    PRIMARY KEY (cut_by, rewind_id, group_id, topic_id, partition),
    FOREIGN KEY (rewind_id, group_id, topic_id, partition) REFERENCES tidemark.backfill
);

-- What a backfill has read is no lost range any more: whoever may write them may remove them.
DO $$
DECLARE
    writer text;
BEGIN
    FOR writer IN SELECT DISTINCT grantee FROM information_schema.role_table_grants
                   WHERE table_schema = 'tidemark' AND table_name = 'lost_range' AND privilege_type = 'INSERT' LOOP
        EXECUTE format('GRANT DELETE ON tidemark.lost_range TO %I', writer);
    END LOOP;
END
$$;
