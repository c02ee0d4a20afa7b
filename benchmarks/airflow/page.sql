-- What 1,000 consumers with 100 partitions each leave in the database: each has one topic, 120 attempts, 960 batches, 100 unsettled records, 100
-- validations, one rewind and 20 generations; also the last samples and a day of lag history. The last run of one in twenty has no verdict.
SET session_replication_role TO replica; -- no foreign keys and no triggers: the rows are right by construction
INSERT INTO tidemark.topic (topic_id, name, kafka_uuid) OVERRIDING SYSTEM VALUE
SELECT n, 'shop.orders-' || n, 'uuid-' || n FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.consumer_group (group_id, name, generation) OVERRIDING SYSTEM VALUE
SELECT n, 'orders_' || n, 20 FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset, committed_at)
SELECT n, n, part, 121000, CASE WHEN n %% 20 = 0 AND part < 8 THEN 120000 ELSE 121000 END, clock_timestamp() - interval '1 minute'
  FROM generate_series(1, {groups}) n, generate_series(0, {partitions} - 1) part;
INSERT INTO tidemark.attempt (attempt_id, group_id, dag_id, run_id, task_id, map_index, try_number, state, planned, started_at, ended_at)
       OVERRIDING SYSTEM VALUE
SELECT (run - 1) * {groups} + n, n, 'consume__orders_' || n, 'scheduled__' || run, 'consume', -1, 1, 'COMMITTED', '[]',
       clock_timestamp() - (121 - run) * interval '5 minutes', clock_timestamp() - (121 - run) * interval '5 minutes' + interval '1 minute'
  FROM generate_series(1, {groups}) n, generate_series(1, 120) run;
INSERT INTO tidemark.batch (batch_id, group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
                            loaded, skipped, retried, failed, unaccounted, sink_rows, committed_at, validation_id) OVERRIDING SYSTEM VALUE
SELECT row_number() OVER (ORDER BY run, n, slice), n, n, slice, run * 1000, run * 1000 + 1000, 1, (run - 1) * {groups} + n,
       990, 5, 4, 1, 0, 990, clock_timestamp() - (121 - run) * interval '5 minutes',
       CASE WHEN run > 20 AND (run < 120 OR n %% 20 > 0) THEN (run - 21) * {groups} + n END
  FROM generate_series(1, {groups}) n, generate_series(1, 120) run, generate_series(0, 7) slice;
INSERT INTO tidemark.failed_record (group_id, topic_id, partition, record_offset, key, value, headers, disposition, error_type, error_text,
                                    attempt_id, created_at, state, due_at)
SELECT n, n, k %% {partitions}, k, 'key', convert_to(repeat('x', 300), 'UTF8'), '[]', 'retry', (ARRAY['Timeout', 'BadRecord'])[1 + k %% 2],
       'no answer within 5 s', n, clock_timestamp() - k * interval '20 minutes', CASE WHEN k < 50 THEN 'WAITING' ELSE 'FAILED' END,
       CASE WHEN k < 50 THEN clock_timestamp() + k * interval '1 minute' END
  FROM generate_series(1, {groups}) n, generate_series(1, 100) k;
INSERT INTO tidemark.validation (validation_id, group_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at)
       OVERRIDING SYSTEM VALUE
SELECT (run - 1) * {groups} + n, n, 'consume__orders_' || n, 'scheduled__' || run, 'orders', 'passed', 8000, 0.5, clock_timestamp() - (101 - run) * interval '5 minutes'
  FROM generate_series(1, 100) run, generate_series(1, {groups}) n;
INSERT INTO tidemark.rewind (rewind_id, state, scenario, allow_loss, reason, planned_by, planned_at, expires_at, digest, applied_by,
                             applied_at, applied_no) OVERRIDING SYSTEM VALUE
SELECT n, 'APPLIED', '{{"scenario": "to-offset", "offset": 0}}', false, 'fares were doubled', 'ann', clock_timestamp() - interval '2 days',
       clock_timestamp(), 'd', 'ann', clock_timestamp() - interval '2 days', n FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.rewind_group (rewind_id, group_id, consumer, group_name, sink, basis, group_state, in_flight, lag, announced_assets)
SELECT n, n, 'orders_' || n, 'orders_' || n, 'shop.orders_' || n, '{{}}', 'Empty', 0, 0, '{{}}' FROM generate_series(1, {groups}) n;
INSERT INTO tidemark.rewind_partition (rewind_id, group_id, topic_id, partition, hold, target, planned_offset, new_offset, superseded_from,
                                       planned_sink_rows, planned_failed_records, old_offset, old_validated_offset, owner_epoch, sink_rows,
                                       failed_records)
SELECT n, n, n, part, false, 0, 500000, 0, 0, 5000, 0, 500000, 0, 1, 5000, 0
  FROM generate_series(1, {groups}) n, generate_series(0, {partitions} - 1) part;
INSERT INTO tidemark.audit_event (at, kind, group_name, database_role, claimed_by, plan, reason, details)
SELECT clock_timestamp() - (51 - k) * interval '1 hour', 'REWIND APPLIED', 'orders_' || n, 'tidemark', 'ann', n, 'fares were doubled', '{{}}'
  FROM generate_series(1, 50) k, generate_series(1, {groups}) n;
INSERT INTO tidemark.rebalance (group_id, generation, at, reason, protocol, assignment)
SELECT n, g, clock_timestamp() - (21 - g) * interval '1 hour', 'a member has joined', 'range',
       jsonb_build_object('a', jsonb_build_object('shop.orders-' || n, (SELECT jsonb_agg(part) FROM generate_series(0, {partitions} - 1) part)))
  FROM generate_series(1, {groups}) n, generate_series(1, 20) g;
INSERT INTO tidemark.lag_partition (group_id, topic_id, partition, sampled_at, position, log_start, log_end, high_watermark, lag, next_at, retention,
                                    committed_at, applied_no, produced, consumed, trend, base_at, base_lag, base_produced, base_consumed,
                                    mid_at, mid_lag, mid_produced, mid_consumed)
SELECT n, n, part, clock_timestamp() - interval '30 seconds', 121000, 0, 121100, 121100, 100, clock_timestamp() - interval '90 seconds',
       interval '7 days', clock_timestamp() - interval '1 minute', n, 1000, 1000, 'KEEPING UP', clock_timestamp() - interval '10 minutes', 100, 0, 0,
       clock_timestamp() - interval '5 minutes', 100, 500, 500
  FROM generate_series(1, {groups}) n, generate_series(0, {partitions} - 1) part;
INSERT INTO tidemark.lag_history (group_id, topic_id, step_s, at, sampled_at, partitions, unknown, lag, open, replay, next_at, produced, consumed)
SELECT n, n, step, date_bin(make_interval(secs => step), clock_timestamp() - k * make_interval(secs => step), 'epoch'),
       clock_timestamp() - k * make_interval(secs => step), {partitions}, 0, 1000 + (k * 37) %% 500, 0, 0,
       clock_timestamp() - k * make_interval(secs => step) - interval '1 minute', k, k
  FROM generate_series(1, {groups}) n, (VALUES (60, 120), (300, 288), (3600, 720)) steps (step, many), LATERAL generate_series(1, many) k;
RESET session_replication_role;
VACUUM ANALYZE;
