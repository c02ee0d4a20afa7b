-- Statements on samples of lag and their history.

-- name: may_write
SELECT bool_and(has_table_privilege(name, 'INSERT')) FROM unnest(ARRAY['tidemark.lag_partition', 'tidemark.lag_history', 'tidemark.lag_group']) name;

-- name: state
-- The database's time, and the group's last rewind. Locks nothing.
SELECT clock_timestamp(),
       (SELECT coalesce(max(applied_no), 0) FROM tidemark.rewind JOIN tidemark.rewind_group part USING (rewind_id)
         WHERE part.group_id = %(group_id)s);

-- name: replays
-- Partitions that are still below the position from which their last rewind moved them back. Locks nothing. OFFSET 0: one index lookup per
-- partition, which finds nothing for most of them.
SELECT topic.name, pos.partition, pos.topic_id, rewind_id, old_offset
  FROM tidemark.consumer_group grp
  JOIN tidemark.partition_offset pos USING (group_id)
 CROSS JOIN LATERAL (SELECT rewind_id, old_offset, applied_no FROM tidemark.rewind_partition part JOIN tidemark.rewind USING (rewind_id)
                      WHERE rewind.state = 'APPLIED' AND part.group_id = pos.group_id AND part.topic_id = pos.topic_id AND part.partition = pos.partition
                        AND part.old_offset > pos.next_offset AND NOT part.hold OFFSET 0) moved
  JOIN tidemark.topic USING (topic_id)
 WHERE grp.name = %(group)s
   AND moved.applied_no = (SELECT max(rewind.applied_no) FROM tidemark.rewind_partition part JOIN tidemark.rewind USING (rewind_id)
                      WHERE part.group_id = pos.group_id AND part.topic_id = pos.topic_id AND part.partition = pos.partition
                        AND rewind.state = 'APPLIED' AND NOT part.hold)
 ORDER BY topic.name, pos.partition;

-- name: last_samples
-- The last sample of each partition of a group. Locks nothing.
SELECT * FROM tidemark.lag_partition WHERE group_id = %(group_id)s;

-- name: moves
-- How far rewinds and resets have moved each partition since its last sample; forward is positive. A swap moves none. Locks nothing.
WITH recent AS MATERIALIZED (
    SELECT rewind_id, applied_no FROM tidemark.rewind
     WHERE applied_no > (SELECT min(applied_no) FROM tidemark.lag_partition WHERE group_id = %(group_id)s) AND applied_no <= %(applied_no)s
       AND NOT beside
)
SELECT topic_id, partition, sum(moved)::bigint
  FROM (SELECT part.topic_id, part.partition, part.new_offset - part.old_offset AS moved
          FROM recent
          JOIN tidemark.rewind_partition part USING (rewind_id)
          JOIN tidemark.lag_partition last USING (group_id, topic_id, partition)
         WHERE last.group_id = %(group_id)s AND recent.applied_no > last.applied_no AND NOT part.hold
         UNION ALL
        SELECT lost.topic_id, lost.partition, lost.end_offset - lost.start_offset
          FROM tidemark.lag_partition last JOIN tidemark.lost_range lost USING (group_id, topic_id, partition)
         WHERE last.group_id = %(group_id)s AND lost.recorded_at > last.sampled_at AND lost.recorded_at <= %(at)s
           AND lost.reason <> 'rewind' AND lost.end_offset IS NOT NULL) moves
 GROUP BY topic_id, partition;

-- name: try_lock
-- One sample of a group at a time; a second one at the same time would count the same records again.
SELECT pg_try_advisory_xact_lock(%(class)s, %(group_id)s);

-- name: forget
-- Deletes samples of partitions that are not in the newest one: the group no longer reads them. Samples of deleted topics stay until a run has
-- stored their unread rest as lost.
DELETE FROM tidemark.lag_partition last
 WHERE group_id = %(group_id)s AND sampled_at < %(at)s
   AND NOT (topic_id = ANY (%(gone)s::smallint[])
            AND EXISTS (SELECT FROM tidemark.partition_offset pos
                         WHERE pos.group_id = last.group_id AND pos.topic_id = last.topic_id AND pos.partition = last.partition
                           AND pos.next_offset < last.log_end));

-- name: write
-- Stores the last sample of each partition, unless a later one is stored. Locks its row.
INSERT INTO tidemark.lag_partition AS last ({columns}) VALUES %s
ON CONFLICT (group_id, topic_id, partition) DO UPDATE SET {changes}
 WHERE excluded.sampled_at > last.sampled_at;

-- name: note_history
-- Stores the sums of the topics' last samples in the step of each length that they fall into, unless one with a larger lag is there: a step
-- keeps its peak. Locks those rows.
INSERT INTO tidemark.lag_history AS step (group_id, topic_id, step_s, at, sampled_at, partitions, unknown, lag, open, replay, next_at, produced, consumed)
SELECT group_id, topic_id, step_s, date_bin(make_interval(secs => step_s), max(sampled_at), 'epoch'), max(sampled_at), count(*),
       count(*) FILTER (WHERE lag IS NULL), coalesce(sum(lag), 0), sum(greatest(high_watermark - log_end, 0)),
       coalesce(sum(greatest(replay_until - position, 0)), 0), min(next_at), sum(produced), sum(consumed)
  FROM tidemark.lag_partition CROSS JOIN unnest(ARRAY[60, 300, 3600]::smallint[]) step_s
 WHERE group_id = %(group_id)s AND topic_id = ANY (%(topic_ids)s::smallint[])
 GROUP BY group_id, topic_id, step_s
ON CONFLICT (group_id, topic_id, step_s, at) DO UPDATE
   SET (sampled_at, partitions, unknown, lag, open, replay, next_at, produced, consumed)
     = (excluded.sampled_at, excluded.partitions, excluded.unknown, excluded.lag, excluded.open, excluded.replay, excluded.next_at,
        excluded.produced, excluded.consumed)
 WHERE excluded.lag >= step.lag;

-- name: thin
-- Deletes history past the retention of its step, of a group (null: of all groups).
DELETE FROM tidemark.lag_history
 WHERE (%(group_id)s::integer IS NULL OR group_id = %(group_id)s)
   AND at < clock_timestamp() - CASE step_s WHEN 60 THEN interval '2 hours' WHEN 300 THEN interval '1 day' ELSE interval '30 days' END;

-- name: history
-- A group's topics over a period, oldest first. Locks nothing.
SELECT topic.name AS topic, at, sampled_at, partitions, unknown, lag AS records, open, replay, next_at, produced, consumed
  FROM tidemark.lag_history JOIN tidemark.topic USING (topic_id) JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.name = %(group)s AND step_s = %(step_s)s AND at >= clock_timestamp() - %(period)s
 ORDER BY topic.name, topic_id, at;

-- name: forget_sums
DELETE FROM tidemark.lag_group WHERE group_id = %(group_id)s;

-- name: sums
-- The stored sums of these groups (null: all), without groups that have pauses: pauses change without a sample. Locks nothing.
SELECT kept.* FROM tidemark.lag_group kept JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.state <> 'Dead' AND grp.side_of IS NULL AND (%(groups)s::text[] IS NULL OR grp.name = ANY (%(groups)s))
   AND kept.paused = 0 AND NOT EXISTS (SELECT FROM tidemark.flow WHERE flow.group_id = grp.group_id AND flow.paused);

-- name: unsummed
-- Condition: groups without stored sums, or with pauses, which may have changed them.
grp.group_id NOT IN (SELECT group_id FROM tidemark.lag_group WHERE paused = 0)
   OR grp.group_id IN (SELECT group_id FROM tidemark.flow WHERE flow.paused)

-- name: lag
-- The last samples of these groups (null: of all), summed by group, or also by topic and by partition. Locks nothing.
-- Braces: grouping columns, grouping sets, and the groups to include.
WITH paused AS MATERIALIZED (
    SELECT DISTINCT last.group_id, last.topic_id, last.partition, true AS paused
      FROM tidemark.flow JOIN tidemark.lag_partition last USING (group_id) JOIN tidemark.topic USING (topic_id)
     WHERE flow.paused AND (flow.topic IS NULL OR flow.topic = topic.name) AND (flow.partition IS NULL OR flow.partition = last.partition)
), part AS (
    SELECT last.*, paused.paused IS TRUE AS paused
      FROM tidemark.lag_partition last JOIN tidemark.consumer_group grp USING (group_id)
      LEFT JOIN paused USING (group_id, topic_id, partition)
     WHERE grp.state <> 'Dead' AND grp.side_of IS NULL AND (%(groups)s::text[] IS NULL OR grp.name = ANY (%(groups)s))
       AND ({which})
)
SELECT group_id{of}, count(*)::integer AS partitions, min(sampled_at) AS sampled_at,
       sum(lag)::bigint AS known, (count(*) FILTER (WHERE lag IS NULL))::integer AS unknown,
       coalesce(sum(lag) FILTER (WHERE NOT paused), 0)::bigint AS waiting,
       (count(*) FILTER (WHERE position IS NULL))::integer AS never_claimed,
       (count(*) FILTER (WHERE lag IS NULL AND position IS NOT NULL))::integer AS truncated,
       (count(*) FILTER (WHERE paused))::integer AS paused,
       CASE WHEN bool_and(high_watermark IS NOT NULL) THEN sum(greatest(high_watermark - log_end, 0))::bigint END AS open,
       coalesce(sum(log_start - position) FILTER (WHERE log_start > position), 0)::bigint AS deleted,
       min(losing_from) AS losing_from, min(next_at + retention) FILTER (WHERE losing_from IS NOT NULL) AS expires_at,
       min(next_at) AS next_at, bool_and(next_at IS NOT NULL) FILTER (WHERE lag > 0) IS NOT FALSE AS timed,
       max(date_part('epoch', sampled_at - next_at) / nullif(date_part('epoch', retention), 0)) AS retention_used,
       coalesce(sum(greatest(replay_until - position, 0)), 0)::bigint AS replay,
       max(committed_at) AS committed_at,
       bool_or(trend = 'IDLE') FILTER (WHERE NOT paused) AS idle, bool_or(trend = 'KEEPING UP') FILTER (WHERE NOT paused) AS keeping_up,
       bool_or(trend = 'CATCHING UP') FILTER (WHERE NOT paused) AS catching_up,
       bool_or(trend = 'FALLING BEHIND') FILTER (WHERE NOT paused) AS falling_behind,
       bool_or(trend = 'WAITING') FILTER (WHERE NOT paused) AS waits,
       sum(produced - base_produced)::bigint AS produced, sum(consumed - base_consumed)::bigint AS consumed,
       extract(epoch FROM max(sampled_at) - min(base_at))::double precision AS window_s,
       CASE WHEN count(*) = 1 THEN min(position) END AS position, CASE WHEN count(*) = 1 THEN min(log_start) END AS log_start,
       CASE WHEN count(*) = 1 THEN min(log_end) END AS log_end, CASE WHEN count(*) = 1 THEN min(replay_until) END AS replay_until,
       max(sampled_at - open_since) AS open_for
  FROM part
 GROUP BY {sets};

-- name: groups
-- These groups (null: all) by name, with the database's time and the facts beyond lag that `tidemark.offsets.health` needs. Includes up to 30
-- recent attempts; attempts of one Airflow run are one run, which has failed if the newest try of any of its members has. Excludes backfills
-- and drains, which read other records. ``dead``: attempts without an end whose driver was killed together with its supervisor; one that
-- has just begun and committed nothing may be about to start. Counts of failed records stop at %(most)s. Locks nothing.
WITH dead AS MATERIALIZED (
    SELECT attempt_id FROM tidemark.attempt
     WHERE state = 'RUNNING'
       AND (started_at < clock_timestamp() - interval '10 minutes' OR EXISTS (SELECT FROM tidemark.batch own WHERE own.attempt_id = attempt.attempt_id))
       AND NOT EXISTS (SELECT FROM pg_stat_activity
                        WHERE datname = current_database() AND application_name = 'tidemark driver ' || attempt_id)
), view AS (
    SELECT position.group_id, min(validation.validation_id) FILTER (WHERE verdict = 'critical') AS stopped_by, bool_or(verdict IS NULL) AS unvalidated
      FROM tidemark.partition_offset position JOIN tidemark.consumer_group grp ON grp.group_id = position.group_id
     CROSS JOIN LATERAL (SELECT * FROM tidemark.batch
                          WHERE batch.group_id = position.group_id AND batch.topic_id = position.topic_id
                            AND batch.partition = position.partition AND batch.start_offset <= position.validated_offset
                          ORDER BY batch.start_offset DESC LIMIT 1) first
     CROSS JOIN LATERAL (SELECT state FROM tidemark.attempt WHERE attempt.attempt_id = first.attempt_id OFFSET 0) attempt
      LEFT JOIN tidemark.validation ON validation.validation_id = first.validation_id
     WHERE (%(groups)s::text[] IS NULL OR grp.name = ANY (%(groups)s))
       AND NOT position.drained AND validated_offset < next_offset AND first.end_offset > position.validated_offset
       AND (verdict IS NOT NULL OR attempt.state <> 'RUNNING' OR first.attempt_id IN (SELECT attempt_id FROM dead))
     GROUP BY position.group_id
)
SELECT grp.group_id, grp.name AS "group", clock_timestamp() AS now, last.*, runs.running_since, runs.longest_pause, runs.longest_run,
       lost.ranges AS lost_ranges, lost.records AS lost_records, lost.unknown AS lost_unknown, pos.partitions, pos.committed_at,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state IN ('WAITING', 'HELD') LIMIT %(most)s) record) AS retrying,
       (SELECT count(*) FROM (SELECT FROM tidemark.failed_record
                               WHERE group_id = grp.group_id AND state = 'FAILED' LIMIT %(most)s) record) AS failed,
       ARRAY(SELECT missed FROM tidemark.objective WHERE group_id = grp.group_id ORDER BY objective) AS objectives,
       coalesce((SELECT reason FROM tidemark.flow
                  WHERE group_id = grp.group_id AND flow.paused ORDER BY topic NULLS FIRST, partition NULLS FIRST LIMIT 1), '') AS pause_reason,
       validation.validation_id, validation.verdict,
       coalesce(view.unvalidated, false) AND (last.dag_id IS NOT NULL OR validation.validation_id IS NOT NULL) AS unvalidated,
       coalesce(view.stopped_by, CASE WHEN validation.verdict = 'critical' THEN validation.validation_id END) AS blocked_by
  FROM tidemark.consumer_group grp
  LEFT JOIN LATERAL (
        SELECT attempt_id, dag_id, run_id, CASE WHEN gone THEN 'FAILED' ELSE state END AS state, error ->> 'kind' AS error_kind,
               CASE WHEN gone THEN 'DriverGone' ELSE error ->> 'type' END AS error_type,
               CASE WHEN gone THEN 'The driver ended without reporting a result.' ELSE left(error ->> 'text', 300) END AS error_text,
               started_at AS began_at, ended_at
          FROM (SELECT DISTINCT ON (coalesce(map_index, -1)) tries.*
                  FROM (SELECT *, EXISTS (SELECT FROM dead WHERE dead.attempt_id = attempt.attempt_id) AS gone,
                               first_value(coalesce(run_id, attempt_id::text)) OVER (ORDER BY attempt_id DESC) AS last_run
                          FROM tidemark.attempt
                         WHERE attempt.group_id = grp.group_id AND of_rewind IS NULL
                           AND (dag_id = 'drain_retries' OR dag_id IS NULL AND task_id = 'drain') IS NOT TRUE
                         ORDER BY attempt_id DESC LIMIT 30) tries
                 WHERE coalesce(run_id, attempt_id::text) = last_run
                 ORDER BY coalesce(map_index, -1), attempt_id DESC) newest
         ORDER BY gone OR state = 'FAILED' DESC, attempt_id DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (
        SELECT min(running_since) AS running_since, max(pause) AS longest_pause, max(length) AS longest_run
          FROM (SELECT min(began) FILTER (WHERE running) AS running_since, max(ended) FILTER (WHERE good) - min(began) AS length,
                       min(began) - lag(min(began)) OVER (ORDER BY min(began)) AS pause
                  FROM (SELECT coalesce(run_id, attempt_id::text) AS run, started_at AS began, ended_at AS ended,
                               state = 'RUNNING' AND NOT EXISTS (SELECT FROM dead WHERE dead.attempt_id = attempt.attempt_id) AS running,
                               state = 'COMMITTED' AS good
                          FROM tidemark.attempt
                         WHERE attempt.group_id = grp.group_id AND of_rewind IS NULL
                           AND (dag_id = 'drain_retries' OR dag_id IS NULL AND task_id = 'drain') IS NOT TRUE
                         ORDER BY attempt_id DESC LIMIT 30) tries
                 GROUP BY run) run) runs ON true
  LEFT JOIN LATERAL (SELECT count(*) AS ranges, sum(end_offset - start_offset)::bigint AS records,
                            count(*) FILTER (WHERE end_offset IS NULL) AS unknown
                       FROM tidemark.lost_range JOIN tidemark.partition_offset place USING (group_id, topic_id, partition)
                      WHERE group_id = grp.group_id AND reason <> 'rewind' AND NOT place.drained) lost ON true
  LEFT JOIN tidemark.lag_group sampled ON sampled.group_id = grp.group_id
  LEFT JOIN LATERAL (SELECT count(*) AS partitions, max(committed_at) AS committed_at
                       FROM tidemark.partition_offset
                      WHERE (sampled.group_id IS NULL OR runs.running_since IS NOT NULL)
                        AND partition_offset.group_id = grp.group_id AND NOT drained) pos ON true
  LEFT JOIN LATERAL (SELECT validation_id, verdict FROM tidemark.validation
                      WHERE validation.group_id = grp.group_id
                        AND EXISTS (SELECT FROM tidemark.batch WHERE batch.validation_id = validation.validation_id)
                      ORDER BY validation_id DESC LIMIT 1) validation ON true
 LEFT JOIN view ON view.group_id = grp.group_id
 WHERE grp.state <> 'Dead' AND grp.side_of IS NULL AND (%(groups)s::text[] IS NULL OR grp.name = ANY (%(groups)s))
 ORDER BY grp.name;

-- name: topic_names
SELECT topic_id, name FROM tidemark.topic WHERE topic_id = ANY (%(topic_ids)s::smallint[]);
