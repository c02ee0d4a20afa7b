-- Topics, consumer groups and their members: the state that Kafka keeps in its group coordinator. `tidemark migrate` creates the schema itself
-- before the first migration.

-- Generations are handed out for ever: a number that was given once is never given again, whatever happens to its group.
CREATE SEQUENCE tidemark.generation AS bigint;

-- A topic as Kafka identifies it. A topic that was deleted and created again has a new UUID and so a new row: its offsets start over and must
-- not meet the lineage of the old one.
CREATE TABLE tidemark.topic (
    topic_id   smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name       text        NOT NULL,
    kafka_uuid text        NOT NULL,
    first_seen timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (name, kafka_uuid)
);

-- A group, with its state in the group protocol.
CREATE TABLE tidemark.consumer_group (
    group_id         integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name             text        NOT NULL UNIQUE,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    state            text        NOT NULL DEFAULT 'Empty'
        CHECK (state IN ('Empty', 'PreparingRebalance', 'CompletingRebalance', 'Stable', 'Dead')),
    state_since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    rebalance_reason text        NOT NULL DEFAULT '', -- why it last began to rebalance, for an operator's eyes
    generation       bigint      NOT NULL DEFAULT 0,  -- the last one taken from tidemark.generation; 0: none yet
    protocol         text,                            -- the assignor that was voted for
    leader           text,                            -- a member_id
    initial_until    timestamptz,                     -- initial rebalance delay; null: not in its first join phase
    deadline         timestamptz,                     -- of the join phase, then of the SyncGroups
    server_start     timestamptz,                     -- of the Postgres server that measured the times of this group
    -- A side group: without members, its positions say how far a backfill of that group has come. It is stored as Dead, and under a name that
    -- no group can have, so that nobody joins, lists or deletes it.
    side_of          integer REFERENCES tidemark.consumer_group,
    CHECK (state <> 'PreparingRebalance' OR deadline IS NOT NULL),
    CHECK (state <> 'CompletingRebalance' OR deadline IS NOT NULL),
    CHECK (state NOT IN ('CompletingRebalance', 'Stable') OR (leader IS NOT NULL AND protocol IS NOT NULL AND generation > 0)),
    CHECK (state NOT IN ('Empty', 'Dead') OR (leader IS NULL AND protocol IS NULL AND deadline IS NULL)),
    CHECK (initial_until IS NULL OR (state = 'PreparingRebalance' AND initial_until <= deadline)),
    CHECK (side_of IS NULL OR state = 'Dead'),
    UNIQUE (group_id, side_of)
);
CREATE INDEX consumer_group_side_of ON tidemark.consumer_group (side_of) WHERE side_of IS NOT NULL;

-- A member of a group. It changes nothing but its own seen_at, unless it holds the lock on its group's row.
CREATE TABLE tidemark.group_member (
    member_no            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- the order in which they came
    group_id             integer     NOT NULL REFERENCES tidemark.consumer_group,
    member_id            text        NOT NULL,
    instance_id          text CHECK (instance_id <> ''), -- static member: group.instance.id
    client_id            text        NOT NULL,
    pending              boolean     NOT NULL, -- the id was handed out, the member has not joined with it yet
    joining              boolean     NOT NULL, -- its JoinGroup waits for the end of the join phase
    synced               boolean     NOT NULL, -- its SyncGroup for the group's generation has come
    session_timeout_ms   integer     NOT NULL CHECK (session_timeout_ms > 0),
    rebalance_timeout_ms integer     NOT NULL CHECK (rebalance_timeout_ms > 0),
    expected_members     integer CHECK (expected_members > 0),
    protocols            jsonb       NOT NULL CHECK (jsonb_typeof(protocols) = 'array'), -- [[name, metadata]], most wanted first
    assignment           jsonb,      -- null: none in this generation yet
    joined_at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    seen_at              timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (group_id, member_id),
    UNIQUE (group_id, instance_id),
    CHECK (NOT pending OR (instance_id IS NULL AND NOT joining AND NOT synced AND assignment IS NULL)),
    CHECK (NOT (joining AND synced))
) WITH (fillfactor = 50); -- updated with every heartbeat: room for heap-only updates

-- The last generations of a group: who was assigned what, and why the group rebalanced.
CREATE TABLE tidemark.rebalance (
    group_id   integer     NOT NULL REFERENCES tidemark.consumer_group,
    generation bigint      NOT NULL CHECK (generation > 0),
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason     text        NOT NULL, -- as consumer_group.rebalance_reason
    protocol   text,                 -- null: nobody was left
    assignment jsonb       NOT NULL CHECK (jsonb_typeof(assignment) = 'object'), -- by instance id, else by member id: {"topic": [partitions]}
    PRIMARY KEY (group_id, generation)
);

-- How an operator wants a group to read. Every member looks before each batch.
CREATE TABLE tidemark.flow (
    group_id   integer     NOT NULL REFERENCES tidemark.consumer_group,
    topic      text, -- null: all topics
    partition  integer CHECK (partition >= 0), -- null: all partitions
    paused     boolean     NOT NULL DEFAULT false,
    priority   integer     NOT NULL DEFAULT 0, -- topics of a higher one are read to their ends first
    max_ahead  interval CHECK (max_ahead > interval '0'), -- how far one topic may run ahead of another in event time; null: any
    reason     text        NOT NULL DEFAULT '',
    changed_by text        NOT NULL DEFAULT current_user,
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE NULLS NOT DISTINCT (group_id, topic, partition),
    CHECK (topic IS NOT NULL OR partition IS NULL),
    CHECK (priority = 0 OR (topic IS NOT NULL AND partition IS NULL)),
    CHECK (max_ahead IS NULL OR topic IS NULL)
);
-- A publication FOR ALL TABLES has this table too. Without a primary key it needs another replica identity, or Postgres refuses to change its
-- rows.
ALTER TABLE tidemark.flow REPLICA IDENTITY FULL;

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
