-- What {groups} consumers with {partitions} partitions each leave in the database after {runs} runs, one every five minutes. Each run commits
-- {slices} slices of one record in each partition and is validated. Samples of lag and generations of groups, which are of limited size, are
-- there too. The last run of each consumer is not validated yet.
INSERT INTO tidemark.consumer_group (group_id, name, generation) OVERRIDING SYSTEM VALUE
SELECT n, 'orders_' || n, 20 FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.topic (topic_id, name, kafka_uuid) OVERRIDING SYSTEM VALUE
SELECT n, CASE n WHEN 1 THEN '{topic}' ELSE 'shop.orders-' || n END, CASE n WHEN 1 THEN '{uuid}' ELSE 'uuid-' || n END
  FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.topic (topic_id, name, kafka_uuid) OVERRIDING SYSTEM VALUE
SELECT {groups} + n, 'orders_' || n || '.retry.5m', 'uuid-5m-' || n FROM generate_series(2, {groups}) n;
INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset, committed_at)
SELECT n, n, part, {runs} * {slices}, ({runs} - 1) * {slices}, clock_timestamp() - interval '1 minute'
  FROM generate_series(1, {groups}) n, generate_series(0, {partitions} - 1) part;
INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset, drained)
SELECT n, {groups} + n, 0, 0, 0, true FROM generate_series(2, {groups}) n;
INSERT INTO tidemark.attempt (attempt_id, group_id, dag_id, run_id, task_id, map_index, try_number, state, planned, started_at, ended_at)
       OVERRIDING SYSTEM VALUE
SELECT i + 1, n, CASE WHEN n <> 4 THEN 'consume__orders_' || n END, CASE WHEN n <> 4 THEN 'scheduled__' || run END,
       CASE WHEN n <> 4 THEN 'consume' END, CASE WHEN n <> 4 THEN -1 END, CASE WHEN n <> 4 THEN 1 END, 'COMMITTED',
       '[{{"topic": "shop.orders", "topic_id": 1, "partition": 0, "start": 0, "end": 1}}]',
       clock_timestamp() - ({runs} + 1 - run) * interval '5 minutes', clock_timestamp() - ({runs} - run) * interval '5 minutes' - interval '4 minutes'
  FROM (SELECT i, i %% {groups} + 1 AS n, i / {groups} + 1 AS run FROM generate_series(0, {groups}::bigint * {runs} - 1) i) made;
INSERT INTO tidemark.validation (validation_id, group_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at) OVERRIDING SYSTEM VALUE
SELECT attempt_id, group_id, dag_id, run_id, 'orders', 'passed', {partitions} * {slices}, 0.5, ended_at
  FROM tidemark.attempt WHERE attempt_id <= {groups}::bigint * ({runs} - 1) ORDER BY attempt_id;
INSERT INTO tidemark.validation_result (validation_id, number, expectation, severity, success, detail)
SELECT validation_id, 0, 'conservation', 'critical', true,
       '{{"text": "conservation: every record of 20 batches is accounted for", "batches": 20, "deleted": 0, "violations": 0}}'
  FROM tidemark.validation ORDER BY validation_id;
INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, headers, disposition, error_type, error_text, attempt_id,
                                    created_at, state, sink_rows, changed_at, tried_at, tried_late, emptied_at)
SELECT n, n, k %% {partitions}, k * 5 * {slices}, '[]', 'retry', 'Timeout', 'no answer within 5 s', k * 5 * {groups} + n,
       at, 'LOADED', 1, at, at, 1, at + interval '30 days'
  FROM generate_series(0, {runs} / 5 - 1) k, generate_series(1, {groups}) n,
       LATERAL (SELECT clock_timestamp() - ({runs} - k * 5) * interval '5 minutes' - interval '31 days' AS at) moment;
INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, key, value, headers, disposition, error_type, error_text,
                                    attempt_id, created_at, state, due_at, retry_topic, retry_topic_id, retry_partition, retry_offset)
SELECT n, n, 0, {runs} * {slices} - 21 - 2 * k, 'key', convert_to(repeat('x', 300), 'UTF8'), '[]', 'retry', 'Timeout', 'no answer within 5 s',
       {groups} * ({runs}::bigint - 1) + n, clock_timestamp() - k * interval '5 minutes', CASE WHEN waits THEN 'WAITING' ELSE 'FAILED' END,
       CASE WHEN waits THEN clock_timestamp() - interval '1 minute' END, CASE WHEN waits THEN 'orders_' || n || '.retry.5m' END,
       CASE WHEN waits AND n > 1 THEN {groups} + n END, CASE WHEN waits AND n > 1 THEN 0 END, CASE WHEN waits AND n > 1 THEN k END
  FROM generate_series(1, {groups}) n, generate_series(0, 9) k, LATERAL (SELECT k %% 2 = 0 AS waits) kind;
INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id, recorded_at)
SELECT n, n, 0, k * {every} * {slices}, k * {every} * {slices} + 1, 'retention', k * {every} * {groups} + n,
       clock_timestamp() - ({runs} - k * {every}) * interval '5 minutes'
  FROM generate_series(0, {runs} / {every} - 2) k, generate_series(1, {groups}) n;
INSERT INTO tidemark.rewind (rewind_id, state, scenario, allow_loss, reason, planned_by, planned_at, expires_at, digest, dag_id, run_id,
                             applied_by, applied_at, applied_no) OVERRIDING SYSTEM VALUE
SELECT i + 1, 'APPLIED', '{{"scenario": "to-offset", "offset": 0}}', false, 'fares were doubled', 'ann', at, at, 'd', 'rewind', 'manual__' || i,
       'ann', at, i + 1
  FROM generate_series(0, {groups}::bigint * ({runs} / {every}) - 1) i,
       LATERAL (SELECT clock_timestamp() - ({runs} - i / {groups} * {every}) * interval '5 minutes' - interval '31 days' AS at) moment;
INSERT INTO tidemark.rewind_group (rewind_id, group_id, consumer, group_name, sink, basis, group_state, in_flight, lag, announced_assets, overwritten_removed_at)
SELECT rewind_id, n, 'orders_' || n, 'orders_' || n, 'shop.orders_' || n, '{{}}', 'Empty', 0, 0, '{{}}', clock_timestamp()
  FROM tidemark.rewind, LATERAL (SELECT (rewind_id - 1) %% {groups} + 1 AS n) grp ORDER BY rewind_id;
INSERT INTO tidemark.rewind_archive (rewind_id, number, group_id, sink, relation, table_partition, rows, removed_at)
SELECT rewind_id, 1, group_id, sink, 'tidemark_archive.rewound_' || rewind_id || '_1', false, 1, clock_timestamp() FROM tidemark.rewind_group;
INSERT INTO tidemark.rewind_partition (rewind_id, group_id, topic_id, partition, hold, target, planned_offset, new_offset, superseded_from,
                                       planned_sink_rows, planned_failed_records, old_offset, old_validated_offset, owner_epoch, sink_rows,
                                       failed_records)
SELECT rewind_id, group_id, group_id, part, false, at, at + 10, at, at, 10, 0, at + 10, at, 1, 10, 0
  FROM tidemark.rewind_group, generate_series(0, {partitions} - 1) part,
       LATERAL (SELECT (rewind_id - 1) / {groups} * {every} * {slices} AS at) place ORDER BY rewind_id, part;
INSERT INTO tidemark.rewound_batch (rewound_by, batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
                                    loaded, skipped, retried, failed, unaccounted, sink_rows, committed_at, deleted, drained)
SELECT rewind_id, rewind_id * 1000 + part, group_id, topic_id, partition, new_offset, old_offset, 1, 1, 10, 0, 0, 0, 0, 10, clock_timestamp(), 0, false
  FROM tidemark.rewind_partition, LATERAL (SELECT -partition - 1 AS part) number;
INSERT INTO tidemark.retry_action (action_id, group_id, kind, filter, reason, done_by, done_at, records) OVERRIDING SYSTEM VALUE
SELECT rewind_id, group_id, 'REDRIVE', '{{}}', 'the service answers again', 'ann', clock_timestamp(), 5 FROM tidemark.rewind_group ORDER BY rewind_id;
INSERT INTO tidemark.redrive (redrive_id, group_id, consumer, state, destination, filter, max_redrives, reason, planned_by, planned_at, started_at,
                              ended_at, dag_id, run_id, digest) OVERRIDING SYSTEM VALUE
SELECT rewind_id, group_id, consumer, 'DONE', 'ladder', '{{}}', 5, 'the service answers again', 'ann', clock_timestamp(), clock_timestamp(),
       clock_timestamp(), 'redrive', 'manual__' || rewind_id, '' FROM tidemark.rewind_group ORDER BY rewind_id;
INSERT INTO tidemark.redrive_record (redrive_id, failed_record_id, state, action_id, done_at)
SELECT redrive_id, redrive_id * 5 + k, 'REDRIVEN', redrive_id, clock_timestamp() FROM tidemark.redrive, generate_series(0, 4) k;
INSERT INTO tidemark.maintenance (done_by, keep, begun_at, ended_at)
SELECT 'airflow', interval '30 days', at, at FROM generate_series(1, {runs} / 288) k, LATERAL (SELECT clock_timestamp() - k * interval '1 day' AS at) moment;
INSERT INTO tidemark.audit_event (at, kind, group_name, database_role, claimed_by, reason, details)
SELECT clock_timestamp() - ({runs} - k * 10) * interval '5 minutes', 'DISCARD', 'orders_' || n, 'tidemark', 'ann', 'the order was cancelled', '{{"records": 1}}'
  FROM generate_series(0, {runs} / 10 - 1) k, generate_series(5, {groups}) n;
INSERT INTO tidemark.audit_event (kind, group_name, database_role, claimed_by, details)
SELECT 'DISCARD', 'orders_' || n, 'tidemark', 'ann', '{{"records": 1}}' FROM generate_series(1, 4) n;
INSERT INTO tidemark.rebalance (group_id, generation, at, reason, protocol, assignment)
SELECT n, g, clock_timestamp() - (21 - g) * interval '1 hour', 'a member has joined', 'range', '{{}}'
  FROM generate_series(1, {groups}) n, generate_series(1, 20) g;
INSERT INTO tidemark.lag_partition (group_id, topic_id, partition, sampled_at, position, log_start, log_end, high_watermark, lag, next_at, retention,
                                    committed_at, applied_no, produced, consumed, trend, base_at, base_lag, base_produced, base_consumed,
                                    mid_at, mid_lag, mid_produced, mid_consumed)
SELECT n, n, part, clock_timestamp() - interval '30 seconds', 1000000, 0, 1000100, 1000100, 100, clock_timestamp() - interval '90 seconds',
       interval '7 days', clock_timestamp() - interval '1 minute', (SELECT max(applied_no) FROM tidemark.rewind), 1000, 1000, 'KEEPING UP',
       clock_timestamp() - interval '10 minutes', 100, 0, 0, clock_timestamp() - interval '5 minutes', 100, 500, 500
  FROM generate_series(1, {groups}) n, generate_series(0, {partitions} - 1) part;
INSERT INTO tidemark.lag_history (group_id, topic_id, step_s, at, sampled_at, partitions, unknown, lag, open, replay, next_at, produced, consumed)
SELECT n, n, step, date_bin(make_interval(secs => step), clock_timestamp() - k * make_interval(secs => step), 'epoch'),
       clock_timestamp() - k * make_interval(secs => step), {partitions}, 0, 1000, 0, 0, clock_timestamp(), k, k
  FROM generate_series(1, {groups}) n, (VALUES (60, 120), (300, 288), (3600, 720)) steps (step, many), LATERAL generate_series(1, many) k;
CREATE SCHEMA shop;
CREATE TABLE shop.orders (city text, population bigint, kafka_topic_id smallint NOT NULL, kafka_partition integer NOT NULL, kafka_offset bigint NOT NULL,
                          kafka_seq integer NOT NULL, UNIQUE (kafka_topic_id, kafka_partition, kafka_offset, kafka_seq));
INSERT INTO shop.orders SELECT 'Ulm', k, n, part, {runs} * {slices} - k, 0
  FROM generate_series(1, 2) n, generate_series(0, {partitions} - 1) part, generate_series(1, 20) k;
INSERT INTO tidemark.batch (batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id, loaded, skipped, retried,
                            failed, unaccounted, sink_rows, validation_id, committed_at, began_at) OVERRIDING SYSTEM VALUE
SELECT i + 1, n, n, part, start, start + 1, 1, attempt, 1, 0, 0, 0, 0, 1, CASE WHEN run < {runs} THEN attempt END, at, at
  FROM generate_series(0, {groups}::bigint * {partitions} * {slices} * {runs} - 1) i,
       LATERAL (SELECT i / ({groups} * {partitions} * {slices}) + 1 AS run, i / ({partitions} * {slices}) %% {groups} + 1 AS n,
                       i / {slices} %% {partitions} AS part, i %% {slices} AS slice) one,
       LATERAL (SELECT (run - 1) * {slices} + slice AS start, (run - 1) * {groups} + n AS attempt,
                       clock_timestamp() - ({runs} + 1 - run) * interval '5 minutes' AS at) more;
SELECT setval('tidemark.attempt_attempt_id_seq', (SELECT max(attempt_id) FROM tidemark.attempt)),
       setval('tidemark.batch_batch_id_seq', (SELECT max(batch_id) FROM tidemark.batch)),
       setval('tidemark.validation_validation_id_seq', (SELECT max(validation_id) FROM tidemark.validation)),
       setval('tidemark.rewind_rewind_id_seq', (SELECT max(rewind_id) FROM tidemark.rewind)),
       setval('tidemark.rewind_applied', (SELECT max(rewind_id) FROM tidemark.rewind)),
       setval('tidemark.redrive_redrive_id_seq', (SELECT max(redrive_id) FROM tidemark.redrive)),
       setval('tidemark.retry_action_action_id_seq', (SELECT max(action_id) FROM tidemark.retry_action)),
       setval('tidemark.consumer_group_group_id_seq', (SELECT max(group_id) FROM tidemark.consumer_group)),
       setval('tidemark.topic_topic_id_seq', (SELECT max(topic_id) FROM tidemark.topic)),
       setval('tidemark.generation', 1000)
