-- name: consumers
-- {consumers} consumers with four partitions each, and one more.
CREATE SCHEMA shop;
CREATE TABLE shop.orders (city text, population bigint, kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL,
                          kafka_offset bigint NOT NULL, kafka_seq integer NOT NULL,
                          UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq));
INSERT INTO tidemark.consumer_group (name) SELECT 'orders_' || n FROM generate_series(0, {consumers}) n;
INSERT INTO tidemark.topic (name, kafka_uuid) SELECT 'shop.orders-' || n, 'uuid-' || n FROM generate_series(0, {consumers}) n;
INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset)
SELECT n, n, part, 0, 0 FROM generate_series(1, {consumers} + 1) n, generate_series(0, 3) part;

-- name: day
-- A day of runs, one every five minutes. Every step of a run is a transaction of its own, as in the product.
DO $$
DECLARE
    first bigint; judged bigint; at timestamptz; run bigint;
BEGIN
    FOR tick IN 0..{ticks} - 1 LOOP
        run := {day} * {ticks} + tick;
        at := clock_timestamp() - {age} * interval '1 day' + tick * interval '5 minutes';
        INSERT INTO tidemark.attempt (group_id, dag_id, run_id, task_id, map_index, try_number, started_at)
        SELECT n, 'consume__orders_' || n, 'scheduled__' || at, 'consume', -1, 1, at FROM generate_series(2, {consumers} + 1) n;
        COMMIT;
        first := currval('tidemark.attempt_attempt_id_seq') - {consumers} + 1;
        UPDATE tidemark.attempt SET planned = (SELECT jsonb_agg(jsonb_build_object('topic', 'shop.orders-' || group_id, 'topic_id', group_id,
                                                                   'partition', part, 'start', run, 'end', run + 1))
                                                 FROM generate_series(0, {slices} - 1) part) WHERE attempt_id >= first;
        COMMIT;
        INSERT INTO tidemark.batch (group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried,
                                    failed, unaccounted, sink_rows, committed_at)
        SELECT group_id, group_id, part, run * 100, run * 100 + 100, 1, attempt_id, 100, 0, 0, 0, 0, 100, at
          FROM tidemark.attempt, generate_series(0, {slices} - 1) part WHERE attempt_id >= first;
        INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, key, value, headers, disposition, error_type, error_text,
                                            attempt_id, created_at, state, due_at, changed_at, ladder_at, retry_topic)
        SELECT group_id, group_id, 0, run * 100, convert_to('key-' || run, 'UTF8'), convert_to(repeat('x', 300), 'UTF8'), '[]', 'retry', 'Timeout',
               'the service has not answered within 5 s', attempt_id, at, 'WAITING', at, at, at, 'orders_' || group_id || '.retry.5m'
          FROM tidemark.attempt WHERE attempt_id >= first AND (attempt_id + tick) % {fails} = 0;
        COMMIT;
        UPDATE tidemark.attempt SET state = 'COMMITTED', ended_at = at + interval '30 s' WHERE attempt_id >= first;
        COMMIT;
        INSERT INTO tidemark.validation (group_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at)
        SELECT group_id, dag_id, run_id, 'orders', 'passed', 200, 0.1, at FROM tidemark.attempt WHERE attempt_id >= first ORDER BY attempt_id;
        judged := currval('tidemark.validation_validation_id_seq') - {consumers} + 1; -- currval() is volatile, so no index serves it
        INSERT INTO tidemark.validation_result (validation_id, number, expectation, severity, success, detail)
        SELECT validation_id, 0, 'conservation', 'critical', true,
               '{{"text": "conservation: every record of 2 batches is accounted for", "batches": 2, "deleted": 0, "violations": 0, "first_violations": []}}'
          FROM tidemark.validation WHERE validation_id >= judged;
        UPDATE tidemark.batch SET validation_id = judged + attempt_id - first WHERE attempt_id >= first;
        UPDATE tidemark.failed_record SET state = 'LOADED', due_at = NULL, sink_rows = 1, changed_at = at, tried_at = at, tried_late = 1, retry_topic = NULL
         WHERE attempt_id >= first AND state = 'WAITING';
        COMMIT;
    END LOOP;
END
$$;
