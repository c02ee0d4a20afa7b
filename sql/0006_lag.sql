-- Lag: what Kafka reported of each partition at one time, and its history by topic. Written by samples; of limited size.

-- The last sample of each partition, with what the next one compares itself with.
CREATE TABLE tidemark.lag_partition (
    group_id       integer     NOT NULL REFERENCES tidemark.consumer_group,
    topic_id       smallint    NOT NULL REFERENCES tidemark.topic,
    partition      integer     NOT NULL CHECK (partition >= 0),
    sampled_at     timestamptz NOT NULL, -- when the position was read
    position       bigint CHECK (position >= 0), -- null: never claimed
    log_start      bigint      NOT NULL CHECK (log_start >= 0),
    log_end        bigint      NOT NULL CHECK (log_end >= log_start), -- the last stable offset
    high_watermark bigint, -- null: unknown
    truncated      boolean     NOT NULL DEFAULT false, -- the log was truncated below the position
    lag            bigint CHECK (lag >= 0), -- null: unknown
    next_at        timestamptz, -- timestamp of the first record that is not yet committed; null: there is none, or unknown
    retention      interval, -- null: permanent or unknown
    losing_from    timestamptz, -- from then on that record has waited for longer than retention leaves it; null: never, or it moves faster
    committed_at   timestamptz, -- of the position
    applied_no     bigint      NOT NULL, -- the group's last rewind, as of the sample
    replay_until   bigint, -- where the last rewind of the partition took it from, while the position is before that
    produced       bigint      NOT NULL DEFAULT 0 CHECK (produced >= 0), -- offsets since the first sample
    consumed       bigint      NOT NULL DEFAULT 0 CHECK (consumed >= 0), -- offsets since the first sample, without moves by rewinds and resets
    trend          text CHECK (trend IN ('IDLE', 'KEEPING UP', 'CATCHING UP', 'FALLING BEHIND', 'WAITING')), -- null: unknown
    base_at        timestamptz NOT NULL, -- the earlier sample that trend and rates compare with
    base_lag       bigint,
    base_next_at   timestamptz,
    base_produced  bigint      NOT NULL,
    base_consumed  bigint      NOT NULL,
    mid_at         timestamptz NOT NULL, -- the one that becomes the base next
    mid_lag        bigint,
    mid_next_at    timestamptz,
    mid_produced   bigint      NOT NULL,
    mid_consumed   bigint      NOT NULL,
    open_since     timestamptz, -- since when the last stable offset has not moved though records are after it
    PRIMARY KEY (group_id, topic_id, partition)
) WITH (fillfactor = 50); -- each sample updates each row: room for heap-only updates

-- A topic over time: of each minute, of each five minutes, of each hour, the sample with the largest lag. The coarser, the longer kept.
CREATE TABLE tidemark.lag_history (
    group_id    integer     NOT NULL REFERENCES tidemark.consumer_group,
    topic_id    smallint    NOT NULL REFERENCES tidemark.topic,
    step_s      smallint    NOT NULL CHECK (step_s IN (60, 300, 3600)),
    at          timestamptz NOT NULL, -- start of the step
    sampled_at  timestamptz NOT NULL,
    partitions  integer     NOT NULL,
    unknown     integer     NOT NULL, -- partitions whose lag is unknown; lag is the sum of the others
    lag         bigint      NOT NULL,
    open        bigint, -- in open transactions; null: unknown
    replay      bigint      NOT NULL, -- left to replay after rewinds
    next_at     timestamptz, -- the earliest of its partitions
    produced    bigint      NOT NULL, -- since the first sample
    consumed    bigint      NOT NULL,
    PRIMARY KEY (group_id, topic_id, step_s, at)
);
-- The line of the last hours on the page: one range of this index for all groups.
CREATE INDEX lag_history_lately ON tidemark.lag_history (at) INCLUDE (group_id, lag) WHERE step_s = 300;

-- The sums of each group's last samples, so that a list of many groups need not read every partition. `lag` in samples.sql defines the columns.
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
    replay_until   bigint,
    open_for       interval
) WITH (fillfactor = 50);

-- An objective that is missed, and that the DAG `watch` has reported. The row is deleted when the objective is met again.
CREATE TABLE tidemark.objective (
    group_id     integer     NOT NULL REFERENCES tidemark.consumer_group,
    objective    text        NOT NULL CHECK (objective IN ('lag', 'failed', 'freshness')),
    missed       text        NOT NULL CHECK (missed <> ''), -- as it was reported: "lag is 14 min, objective 10m"
    reported_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (group_id, objective)
);
