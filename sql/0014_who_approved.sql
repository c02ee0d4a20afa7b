-- Which Airflow run has planned a redrive, who approved it, and what maintenance removed. Kept permanently.

ALTER TABLE tidemark.redrive
    ADD COLUMN dag_id text,
    ADD COLUMN run_id text,
    ADD COLUMN approved_by text CHECK (approved_by <> ''); -- null: nobody was asked

-- One row a maintenance that removed something, or that has not ended.
CREATE TABLE tidemark.maintenance (
    maintenance_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    done_by        text        NOT NULL CHECK (done_by <> ''),
    dag_id         text,
    run_id         text,
    keep           interval    NOT NULL, -- what is older goes
    begun_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at       timestamptz,          -- null: it still runs, or was killed
    archives       integer     NOT NULL DEFAULT 0 CHECK (archives >= 0),
    rows           bigint      NOT NULL DEFAULT 0 CHECK (rows >= 0), -- in these archives
    payloads       bigint      NOT NULL DEFAULT 0 CHECK (payloads >= 0) -- of settled records
);
