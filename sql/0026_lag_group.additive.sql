-- The sums of each group's last samples, so that a list of many groups need not read every partition. Written with the samples; what they
-- mean is said at `lag` in samples.sql, whose columns these are.
CREATE TABLE tidemark.lag_group (
    group_id       integer PRIMARY KEY REFERENCES tidemark.consumer_group,
    partitions     integer     NOT NULL,
    sampled_at     timestamptz NOT NULL,
    known          bigint,
    unknown        integer     NOT NULL,
    waiting        bigint      NOT NULL,
    never_claimed  integer     NOT NULL,
    truncated      integer     NOT NULL,
    paused         integer     NOT NULL,
    open           bigint,
    deleted        bigint      NOT NULL,
    losing_from    timestamptz,
    expires_at     timestamptz,
    next_at        timestamptz,
    timed          boolean     NOT NULL,
    retention_used double precision,
    replay         bigint      NOT NULL,
    committed_at   timestamptz,
    idle           boolean,
    keeping_up     boolean,
    catching_up    boolean,
    falling_behind boolean,
    waits          boolean,
    produced       bigint      NOT NULL,
    consumed       bigint      NOT NULL,
    window_s       double precision,
    position       bigint,
    log_start      bigint,
    log_end        bigint,
    replay_until   bigint
) WITH (fillfactor = 50);

-- The line of the last hours on the page: one range of this index for all groups.
CREATE INDEX lag_history_lately ON tidemark.lag_history (at) INCLUDE (group_id, lag) WHERE step_s = 300;

-- With what the list of all retries shows, so that it need not read the records themselves.
DROP INDEX tidemark.failed_record_unsettled;
CREATE INDEX failed_record_unsettled ON tidemark.failed_record (group_id, state, error_type) INCLUDE (created_at, failed_record_id)
 WHERE state IN ('WAITING', 'HELD', 'FAILED');

-- Whoever may write samples may replace these.
DO $$
DECLARE
    writer text;
BEGIN
    FOR writer IN SELECT DISTINCT grantee FROM information_schema.role_table_grants
                   WHERE table_schema = 'tidemark' AND table_name = 'lag_partition' AND privilege_type = 'INSERT' LOOP
        EXECUTE format('GRANT SELECT, INSERT, DELETE ON tidemark.lag_group TO %I', writer);
    END LOOP;
END
$$;
