-- Statements on positions, attempts and the ledger. Lock order: group, members, partitions by (topic, partition).

-- name: ensure_group
-- The group's id; creates the row if it does not exist. Locks no existing row. No row returned: another session has just created it, repeat.
WITH existing AS (
    SELECT group_id FROM tidemark.consumer_group WHERE name = %(name)s
), inserted AS (
    INSERT INTO tidemark.consumer_group (name) SELECT %(name)s WHERE NOT EXISTS (SELECT FROM existing)
    ON CONFLICT DO NOTHING RETURNING group_id
)
SELECT group_id FROM existing UNION ALL SELECT group_id FROM inserted;

-- name: find_group
SELECT group_id FROM tidemark.consumer_group WHERE name = %(name)s;

-- name: ensure_topic
-- The topic's id; a name with a new UUID gets a new row. A topic that had no UUID keeps its row when the cluster gives it one (its brokers were
-- upgraded), and that row is locked; otherwise locks no existing row. No row returned: see `ensure_group`.
-- Does not insert a row that exists: an insert with a conflict would still use up one of the 32,767 ids.
WITH existing AS (
    SELECT topic_id FROM tidemark.topic WHERE name = %(name)s AND kafka_uuid = %(kafka_uuid)s
), identified AS (
    UPDATE tidemark.topic SET kafka_uuid = %(kafka_uuid)s
     WHERE name = %(name)s AND kafka_uuid = %(no_id)s AND NOT EXISTS (SELECT FROM existing)
    RETURNING topic_id
), inserted AS (
    INSERT INTO tidemark.topic (name, kafka_uuid)
    SELECT %(name)s, %(kafka_uuid)s WHERE NOT EXISTS (SELECT FROM existing) AND NOT EXISTS (SELECT FROM identified)
    ON CONFLICT DO NOTHING RETURNING topic_id
)
SELECT topic_id FROM existing UNION ALL SELECT topic_id FROM identified UNION ALL SELECT topic_id FROM inserted;

-- name: start_partition
-- Stores the first position of a partition; does nothing if it has one. Locks the new row.
INSERT INTO tidemark.partition_offset (group_id, topic_id, partition, next_offset, validated_offset, drained)
VALUES (%(group_id)s, %(topic_id)s, %(partition)s, %(offset)s, %(offset)s, %(drained)s) ON CONFLICT DO NOTHING;

-- name: positions
-- Every position of a group, including earlier incarnations of topics, but without its retry topics. Locks nothing.
SELECT topic.name, partition, topic_id, topic.kafka_uuid, next_offset, validated_offset, part.generation, owner, owner_epoch, instance_id,
       committed_at, leader_epoch
  FROM tidemark.partition_offset part JOIN tidemark.topic USING (topic_id) JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.name = %(group)s AND NOT part.drained
 ORDER BY topic.name, topic_id, partition;

-- name: next_generation
SELECT nextval('tidemark.generation');

-- name: claim
-- Claims a partition for a generation. Locks its row. No row returned: a newer generation holds it, or another owner in the same one. A
-- released partition can be claimed again in its generation: by the next process of a static member that ended before it left the group.
UPDATE tidemark.partition_offset
   SET owner = %(owner)s, generation = %(generation)s, owner_epoch = owner_epoch + 1,
       instance_id = CASE WHEN next_offset < %(end)s THEN %(instance_id)s ELSE instance_id END
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
   AND (generation < %(generation)s OR (generation = %(generation)s AND (owner = %(owner)s OR owner IS NULL)))
RETURNING next_offset, owner_epoch, drained, leader_epoch;

-- name: group_generation
-- The generation of a group's members. Locks nothing.
SELECT generation FROM tidemark.consumer_group WHERE group_id = %(group_id)s;

-- name: epochs
-- The epochs of a group's partitions. Locks nothing.
SELECT topic_id, partition, owner_epoch, next_offset, owner FROM tidemark.partition_offset
 WHERE group_id = %(group_id)s AND topic_id = ANY (%(topic_ids)s::smallint[]) ORDER BY topic_id, partition;

-- name: instance_id_of
-- The instance id of an attempt's Airflow task; no row returned for an attempt that was started manually.
SELECT dag_id || '/' || task_id || '/' || map_index FROM tidemark.attempt WHERE attempt_id = %(attempt_id)s AND dag_id IS NOT NULL;

-- name: partitions_of_instance
-- The partitions that a static member claimed last and no other member has claimed since. Locks nothing.
SELECT topic.name, partition, generation FROM tidemark.partition_offset JOIN tidemark.topic USING (topic_id)
 WHERE group_id = %(group_id)s AND instance_id = %(instance_id)s ORDER BY topic.name, partition;

-- name: note_leader_epoch
-- Stores the leader epoch of a position that was found in the log, unless it has moved. Never waits for a lock: a commit stores it, too.
UPDATE tidemark.partition_offset pos SET leader_epoch = %(leader_epoch)s
  FROM (SELECT group_id, topic_id, partition FROM tidemark.partition_offset
         WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
           AND owner_epoch = %(epoch)s AND next_offset = %(position)s FOR NO KEY UPDATE SKIP LOCKED) held
 WHERE pos.group_id = held.group_id AND pos.topic_id = held.topic_id AND pos.partition = held.partition;

-- name: release
-- Releases a partition if it is still held. Locks its row. The epoch does not change: a batch in flight may still commit.
UPDATE tidemark.partition_offset SET owner = NULL
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s AND owner_epoch = %(epoch)s;

-- name: jump
-- Moves a position without reading, for a reset. Locks the row. No row returned: fenced.
UPDATE tidemark.partition_offset SET next_offset = %(to)s, leader_epoch = NULL, committed_at = clock_timestamp()
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
   AND owner_epoch = %(epoch)s AND next_offset = %(start)s RETURNING next_offset;

-- name: lost_range
INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id)
VALUES (%(group_id)s, %(topic_id)s, %(partition)s, %(start)s, %(end)s, %(reason)s, %(attempt_id)s) ON CONFLICT DO NOTHING;

-- name: unseen
-- Topics that a group has read in part, according to their last sample, and that its newest sample did not include. ``others``: UUIDs of the
-- topics in the newest sample that the group has read. Locks nothing.
SELECT DISTINCT topic.topic_id, topic.name, topic.kafka_uuid,
       ARRAY(SELECT DISTINCT kafka_uuid FROM tidemark.lag_partition seen JOIN tidemark.topic USING (topic_id)
              WHERE seen.group_id = last.group_id AND seen.sampled_at = newest.at AND position IS NOT NULL) AS others
  FROM tidemark.lag_partition last
  JOIN tidemark.partition_offset pos USING (group_id, topic_id, partition)
  JOIN tidemark.topic USING (topic_id)
 CROSS JOIN LATERAL (SELECT max(sampled_at) AS at FROM tidemark.lag_partition WHERE group_id = last.group_id) newest
 WHERE last.group_id = %(group_id)s AND NOT pos.drained AND last.log_end > pos.next_offset AND last.sampled_at < newest.at;

-- name: leave_gone
-- Stores the unread rest of these topics as lost, up to the end in the last sample, and moves the positions there. Locks the positions, in
-- the common lock order.
WITH gone AS MATERIALIZED (
    SELECT pos.group_id, pos.topic_id, pos.partition, pos.next_offset, pos.validated_offset, last.log_end
      FROM tidemark.partition_offset pos JOIN tidemark.lag_partition last USING (group_id, topic_id, partition)
     WHERE pos.group_id = %(group_id)s AND pos.topic_id = ANY (%(topic_ids)s::smallint[]) AND NOT pos.drained AND last.log_end > pos.next_offset
     ORDER BY pos.topic_id, pos.partition FOR NO KEY UPDATE OF pos
), moved AS (
    UPDATE tidemark.partition_offset pos
       SET next_offset = gone.log_end, leader_epoch = NULL, owner = NULL, owner_epoch = owner_epoch + 1, committed_at = clock_timestamp(),
           validated_offset = CASE WHEN gone.validated_offset = gone.next_offset THEN gone.log_end ELSE gone.validated_offset END
      FROM gone WHERE pos.group_id = gone.group_id AND pos.topic_id = gone.topic_id AND pos.partition = gone.partition
), lost AS (
    INSERT INTO tidemark.lost_range (group_id, topic_id, partition, start_offset, end_offset, reason, attempt_id)
    SELECT group_id, topic_id, partition, next_offset, log_end, %(reason)s, %(attempt_id)s FROM gone
    ON CONFLICT (group_id, topic_id, partition, start_offset) DO NOTHING
    RETURNING topic_id, partition, start_offset, end_offset
)
SELECT topic.name, partition, topic_id, start_offset, end_offset FROM lost JOIN tidemark.topic USING (topic_id) ORDER BY topic.name, partition;

-- name: left_behind
-- Partitions of these topics whose rest is stored as lost. Locks nothing.
SELECT DISTINCT topic_id, partition FROM tidemark.lost_range
 WHERE group_id = %(group_id)s AND topic_id = ANY (%(topic_ids)s::smallint[]) AND reason IN ('topic deleted', 'topic re-created');

-- name: move_offset
-- Moves one partition's offset if the caller still owns it. Locks that row. No row returned: fenced, or a twin has already committed.
UPDATE tidemark.partition_offset SET next_offset = %(end)s, leader_epoch = %(leader_epoch)s, committed_at = clock_timestamp()
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
   AND owner_epoch = %(epoch)s AND next_offset = %(start)s RETURNING next_offset;

-- name: read_offset
-- The row, once any session that is writing it has finished. Locks it.
SELECT next_offset, owner_epoch, owner, generation FROM tidemark.partition_offset
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s FOR UPDATE;

-- name: insert_batch
INSERT INTO tidemark.batch (group_id, topic_id, partition, start_offset, end_offset, owner_epoch, attempt_id,
                            loaded, skipped, retried, failed, unaccounted, sink_rows, deleted, drained)
VALUES (%(group_id)s, %(topic_id)s, %(partition)s, %(start)s, %(end)s, %(epoch)s, %(attempt_id)s,
        %(loaded)s, %(skipped)s, %(retried)s, %(failed)s, %(unaccounted)s, %(sink_rows)s, %(deleted)s, %(drained)s) RETURNING batch_id;

-- name: shorten_skipped
-- Shortens a skipped range by the records that a backfill has read; deletes the range if it is empty. Locks that row. No row returned: the
-- range does not exist.
WITH skipped AS (
    SELECT lost_range_id, end_offset FROM tidemark.lost_range
     WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
       AND start_offset = %(start)s AND end_offset >= %(end)s AND reason = 'rewind' FOR UPDATE
), gone AS (
    DELETE FROM tidemark.lost_range USING skipped
     WHERE lost_range.lost_range_id = skipped.lost_range_id AND skipped.end_offset = %(end)s
), shortened AS (
    UPDATE tidemark.lost_range SET start_offset = %(end)s FROM skipped
     WHERE lost_range.lost_range_id = skipped.lost_range_id AND skipped.end_offset > %(end)s
)
SELECT end_offset FROM skipped;

-- name: set_whole_batch
-- Gives the rows of these batches, all new in the same transaction, the lineage of the first batch.
UPDATE tidemark.batch SET whole_batch_id = %(whole_batch_id)s WHERE batch_id = ANY (%(batch_ids)s::bigint[]);

-- name: read_batch
-- The ledger row of a slice, if it was committed under this epoch. Locks nothing.
SELECT loaded, skipped, retried, failed, unaccounted, sink_rows, deleted FROM tidemark.batch
 WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s
   AND start_offset = %(start)s AND end_offset = %(end)s AND owner_epoch = %(epoch)s;

-- name: new_attempt
-- Writes the attempt's row and ends older tries of its task that are still running. Locks their rows.
WITH ended AS (
    UPDATE tidemark.attempt
       SET state = 'FAILED', ended_at = clock_timestamp(),
           error = jsonb_build_object('kind', 'fenced', 'type', 'Superseded', 'text', 'A newer try took over before this one had ended.')
     WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s AND task_id = %(task_id)s AND map_index = %(map_index)s AND state = 'RUNNING'
)
INSERT INTO tidemark.attempt (group_id, dag_id, run_id, task_id, map_index, try_number, of_rewind)
VALUES (%(group_id)s, %(dag_id)s, %(run_id)s, %(task_id)s, %(map_index)s, %(try_number)s, %(of_rewind)s) RETURNING attempt_id;

-- name: earlier_attempts
-- Earlier attempts of the same Airflow task, newest first. Locks nothing.
SELECT earlier.attempt_id, earlier.state, earlier.planned
  FROM tidemark.attempt me JOIN tidemark.attempt earlier USING (dag_id, run_id, task_id, map_index)
 WHERE me.attempt_id = %(attempt_id)s AND earlier.attempt_id < me.attempt_id
 ORDER BY earlier.attempt_id DESC;

-- name: dag_run_planned
-- Whether an attempt of the group in the same DAG run has planned to read something. Locks nothing.
SELECT EXISTS (SELECT FROM tidemark.attempt me JOIN tidemark.attempt other USING (dag_id, run_id, group_id)
                WHERE me.attempt_id = %(attempt_id)s AND other.planned <> '[]');

-- name: newer_attempt
-- A later attempt of the same group or backfill. Locks nothing.
SELECT newer.attempt_id
  FROM tidemark.attempt me JOIN tidemark.attempt newer USING (group_id)
 WHERE me.attempt_id = %(attempt_id)s AND newer.attempt_id > me.attempt_id AND newer.of_rewind IS NOT DISTINCT FROM me.of_rewind
 LIMIT 1;

-- name: read_attempt
-- ``driver_alive``: whether a driver on a cluster has a session. Locks nothing.
SELECT attempt_id, state, planned, error, application, extract(epoch FROM clock_timestamp() - started_at)::double precision AS age_s,
       application IS NOT NULL AND EXISTS (SELECT FROM pg_stat_activity
                                            WHERE datname = current_database() AND application_name = 'tidemark driver ' || attempt_id)
       AS driver_alive
  FROM tidemark.attempt WHERE attempt_id = %(attempt_id)s;

-- name: running_application
-- The newest running attempt of the same Airflow task whose driver was submitted to a cluster. Locks nothing.
SELECT attempt_id FROM tidemark.attempt JOIN tidemark.consumer_group grp USING (group_id)
 WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s AND task_id = %(task_id)s AND map_index = %(map_index)s AND grp.name = %(group)s
   AND attempt.state = 'RUNNING' AND application IS NOT NULL AND of_rewind IS NOT DISTINCT FROM %(of_rewind)s
 ORDER BY attempt_id DESC LIMIT 1;

-- name: note_application
-- Adds facts about the attempt's application on a cluster. Locks the attempt's row.
UPDATE tidemark.attempt SET application = coalesce(application, '{}') || %(facts)s WHERE attempt_id = %(attempt_id)s AND state = 'RUNNING';

-- name: stop_requested
-- Whether an attempt whose driver is on a cluster has ended: its caller has stopped it. Locks nothing.
SELECT state <> 'RUNNING' AND application IS NOT NULL FROM tidemark.attempt WHERE attempt_id = %(attempt_id)s;

-- name: start_driver
-- Makes the caller the driver of its application's attempt. No row returned: the attempt has ended, or has a driver, or belongs to another
-- application. Locks its row.
UPDATE tidemark.attempt SET application = application || jsonb_build_object('driver_at', clock_timestamp())
 WHERE attempt_id = %(attempt_id)s AND state = 'RUNNING' AND application ->> 'name' = %(name)s AND NOT application ? 'driver_at'
RETURNING attempt_id;

-- name: plan_attempt
UPDATE tidemark.attempt SET planned = %(planned)s WHERE attempt_id = %(attempt_id)s AND state = 'RUNNING';

-- name: end_attempt
-- Ends an attempt that is still running; a second call changes nothing. Locks its row.
UPDATE tidemark.attempt SET state = %(state)s, error = %(error)s, ended_at = clock_timestamp()
 WHERE attempt_id = %(attempt_id)s AND state = 'RUNNING';

-- name: end_abandoned
-- Ends old attempts whose driver no longer has a session: it was killed, and no later try ended the attempt. Locks their rows.
UPDATE tidemark.attempt
   SET state = 'FAILED', ended_at = clock_timestamp(),
       error = jsonb_build_object('kind', 'unavailable', 'type', 'DriverGone', 'text', 'The driver ended without reporting a result.')
 WHERE state = 'RUNNING' AND started_at < clock_timestamp() - interval '24 hours'
   AND NOT EXISTS (SELECT FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'tidemark driver ' || attempt_id)
RETURNING attempt_id;

-- name: attempt_ledger
-- An attempt's commits so far, one row per partition. Locks nothing.
SELECT topic.name AS topic, partition, min(start_offset) AS start, max(end_offset) AS end, count(*) AS batches,
       sum(loaded)::bigint AS loaded, sum(skipped)::bigint AS skipped, sum(retried)::bigint AS retried,
       sum(failed)::bigint AS failed, sum(unaccounted)::bigint AS unaccounted, sum(sink_rows)::bigint AS sink_rows,
       sum(deleted)::bigint AS deleted
  FROM tidemark.batch JOIN tidemark.topic USING (topic_id)
 WHERE attempt_id = %(attempt_id)s GROUP BY topic.name, partition ORDER BY topic.name, partition;

-- name: attempt_lost
-- The ranges that an attempt stored as lost. Retry topics are omitted: their records are in Postgres. Locks nothing.
SELECT topic.name AS topic, partition, start_offset AS start, end_offset AS end, reason
  FROM tidemark.lost_range JOIN tidemark.partition_offset USING (group_id, topic_id, partition) JOIN tidemark.topic USING (topic_id)
 WHERE attempt_id = %(attempt_id)s AND NOT drained ORDER BY topic.name, partition, start_offset;
