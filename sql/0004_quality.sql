-- Verdicts on what runs wrote.

-- One row per validation. A later run announces what an earlier one could not.
CREATE TABLE tidemark.validation (
    validation_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      integer     NOT NULL REFERENCES tidemark.consumer_group,
    dag_id        text,
    run_id        text,
    suite         text, -- null: the conservation check alone
    verdict       text        NOT NULL CHECK (verdict IN ('passed', 'warning', 'critical')),
    sink_rows     bigint      NOT NULL CHECK (sink_rows >= 0),
    seconds       double precision NOT NULL CHECK (seconds >= 0),
    validated_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    ranges        jsonb,       -- the offsets that the verdict covers
    announced_at  timestamptz -- when an asset event announced it; null: the next `publish` does
);
CREATE INDEX validation_group ON tidemark.validation (group_id, validation_id);
CREATE INDEX validation_critical ON tidemark.validation (group_id) WHERE verdict = 'critical';
CREATE INDEX validation_to_announce ON tidemark.validation (group_id) WHERE announced_at IS NULL;
ALTER TABLE tidemark.batch ADD FOREIGN KEY (validation_id) REFERENCES tidemark.validation;

-- One row per expectation, in the order of the suite; the conservation check is number 0.
CREATE TABLE tidemark.validation_result (
    validation_id bigint  NOT NULL REFERENCES tidemark.validation ON DELETE CASCADE,
    number        integer NOT NULL CHECK (number >= 0),
    expectation   text    NOT NULL,
    severity      text    NOT NULL CHECK (severity IN ('critical', 'warning', 'info')),
    success       boolean NOT NULL,
    detail        jsonb   NOT NULL, -- the expectation's arguments and what was observed
    PRIMARY KEY (validation_id, number)
);

-- Exactly which rows an expectation objected to.
CREATE TABLE tidemark.validation_row (
    validation_id   bigint   NOT NULL,
    number          integer  NOT NULL,
    kafka_topic_id  smallint NOT NULL REFERENCES tidemark.topic (topic_id),
    kafka_partition integer  NOT NULL,
    kafka_offset    bigint   NOT NULL,
    kafka_seq       integer  NOT NULL,
    FOREIGN KEY (validation_id, number) REFERENCES tidemark.validation_result ON DELETE CASCADE
);
CREATE INDEX validation_row_result ON tidemark.validation_row (validation_id, number);
ALTER TABLE tidemark.validation_row REPLICA IDENTITY FULL;
