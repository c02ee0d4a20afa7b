-- What the page shows of a group: its last generations (who was assigned what, and why the group rebalanced), and how fast records fail.

CREATE TABLE tidemark.rebalance (
    group_id   integer     NOT NULL REFERENCES tidemark.consumer_group,
    generation bigint      NOT NULL CHECK (generation > 0),
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason     text        NOT NULL, -- as consumer_group.rebalance_reason
    protocol   text,                 -- null: nobody was left
    assignment jsonb       NOT NULL CHECK (jsonb_typeof(assignment) = 'object'), -- by instance id, else by member id: {"topic": [partitions]}
    PRIMARY KEY (group_id, generation)
);

-- Runs when the transaction commits, because a group is stored before its members. Keeps the newest 100 generations of a group. The
-- transaction has locked the group's row, so no other one runs this for the group.
CREATE FUNCTION tidemark.keep_rebalance() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO tidemark.rebalance (group_id, generation, reason, protocol, assignment)
    SELECT NEW.group_id, NEW.generation, NEW.rebalance_reason, NEW.protocol,
           coalesce(jsonb_object_agg(coalesce(instance_id, member_id), coalesce(assignment -> 'partitions', '{}')), '{}')
      FROM tidemark.group_member WHERE group_id = NEW.group_id AND NOT pending
    ON CONFLICT DO NOTHING;
    DELETE FROM tidemark.rebalance
     WHERE group_id = NEW.group_id
       AND generation <= (SELECT generation FROM tidemark.rebalance WHERE group_id = NEW.group_id
                           ORDER BY generation DESC OFFSET 100 LIMIT 1);
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER keep_rebalance AFTER UPDATE OF state, generation ON tidemark.consumer_group DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.state IN ('Stable', 'Empty') AND NEW.generation > 0
                       AND (NEW.state, NEW.generation) IS DISTINCT FROM (OLD.state, OLD.generation))
    EXECUTE FUNCTION tidemark.keep_rebalance();
REVOKE EXECUTE ON FUNCTION tidemark.keep_rebalance() FROM PUBLIC;

-- Counts the records of a group that have failed lately, without reading the others.
CREATE INDEX failed_record_lately ON tidemark.failed_record (group_id, created_at);
