-- Objectives: what was said of a consumer's `slo`, so that it is said once.

-- An objective that is missed, and that the DAG `watch` has reported. The row is deleted when the objective is met again.
CREATE TABLE tidemark.objective (
    group_id     integer     NOT NULL REFERENCES tidemark.consumer_group,
    objective    text        NOT NULL CHECK (objective IN ('lag', 'failed', 'freshness')),
    missed       text        NOT NULL CHECK (missed <> ''), -- as it was reported: "lag is 14 min, objective 10m"
    reported_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, objective)
);

-- Counts a group's failed records without reading those that are settled.
CREATE INDEX failed_record_failed ON tidemark.failed_record (group_id) WHERE state = 'FAILED';

-- Whoever may report a miss may report that it is over: roles that were granted rights by hand have them by default privileges.
DO $$
DECLARE
    writer text;
BEGIN
    FOR writer IN SELECT DISTINCT grantee FROM information_schema.role_table_grants
                   WHERE table_schema = 'tidemark' AND table_name = 'objective' AND privilege_type = 'INSERT' LOOP
        EXECUTE format('GRANT DELETE ON tidemark.objective TO %I', writer);
    END LOOP;
END
$$;
