-- Consumer groups and their members: the state that Kafka keeps in its group coordinator.

ALTER TABLE tidemark.consumer_group
    ADD COLUMN state         text        NOT NULL DEFAULT 'Empty'
        CHECK (state IN ('Empty', 'PreparingRebalance', 'CompletingRebalance', 'Stable', 'Dead')),
    ADD COLUMN state_since   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ADD COLUMN rebalance_reason text     NOT NULL DEFAULT '',         -- why it last began to rebalance, for an operator's eyes
    ADD COLUMN generation    bigint      NOT NULL DEFAULT 0,          -- the last one taken from tidemark.generation; 0: none yet
    ADD COLUMN protocol      text,                                    -- the assignor that was voted for
    ADD COLUMN leader        text,                                    -- a member_id
    ADD COLUMN initial_until timestamptz,                             -- initial rebalance delay; null: not in its first join phase
    ADD COLUMN deadline      timestamptz,                             -- of the join phase, then of the SyncGroups
    ADD COLUMN server_start  timestamptz,                             -- of the Postgres server that measured the times of this group
    ADD CHECK (state <> 'PreparingRebalance' OR deadline IS NOT NULL),
    ADD CHECK (state <> 'CompletingRebalance' OR deadline IS NOT NULL),
    ADD CHECK (state NOT IN ('CompletingRebalance', 'Stable') OR (leader IS NOT NULL AND protocol IS NOT NULL AND generation > 0)),
    ADD CHECK (state NOT IN ('Empty', 'Dead') OR (leader IS NULL AND protocol IS NULL AND deadline IS NULL)),
    ADD CHECK (initial_until IS NULL OR (state = 'PreparingRebalance' AND initial_until <= deadline));

-- One row a member. A member changes nothing but its own seen_at, unless it holds the lock on its group's row.
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

-- Whoever may write members may remove them: the only rows of this schema that a run deletes.
DO $$
DECLARE
    writer text;
BEGIN
    FOR writer IN SELECT DISTINCT grantee FROM information_schema.role_table_grants
                   WHERE table_schema = 'tidemark' AND table_name = 'group_member' AND privilege_type = 'INSERT' LOOP
        EXECUTE format('GRANT DELETE ON tidemark.group_member TO %I', writer);
    END LOOP;
END
$$;
