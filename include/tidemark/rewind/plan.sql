-- Statements that plan a rewind. Unless noted, they lock only the rows that they insert.

-- name: group_now
-- The group's state, number of running attempts, last rewind, and how fast its runs can read: the best ten minutes, or the best shorter run,
-- of the last 20. An average would count the time in which a run waited for records.
SELECT group_id, state,
       (SELECT count(*) FROM tidemark.attempt WHERE attempt.group_id = grp.group_id AND attempt.state = 'RUNNING') AS in_flight,
       (SELECT max(part.offsets / nullif(least(600, extract(epoch FROM part.until - part.started_at)), 0))::double precision
          FROM (SELECT attempt.started_at, max(batch.committed_at) AS until, sum(end_offset - start_offset) AS offsets
                  FROM (SELECT * FROM tidemark.attempt WHERE attempt.group_id = grp.group_id ORDER BY attempt_id DESC LIMIT 20) attempt
                  JOIN tidemark.batch USING (attempt_id)
                 GROUP BY attempt_id, attempt.started_at, div(extract(epoch FROM batch.committed_at - attempt.started_at), 600)) part) AS records_per_s,
       (SELECT coalesce(max(applied_no), 0) FROM tidemark.rewind JOIN tidemark.rewind_group part USING (rewind_id)
         WHERE part.group_id = grp.group_id) AS last_rewind
  FROM tidemark.consumer_group grp
 WHERE name = %(group)s;

-- name: unvalidated
-- Partitions that the group has read without any validated rows: its ledger starts at or after the validated offset.
SELECT topic_id, partition FROM tidemark.partition_offset pos
 WHERE group_id = %(group_id)s AND NOT drained AND next_offset > validated_offset
   AND NOT EXISTS (SELECT FROM tidemark.batch WHERE batch.group_id = pos.group_id AND batch.topic_id = pos.topic_id
                      AND batch.partition = pos.partition AND NOT batch.drained AND batch.start_offset < pos.validated_offset);

-- name: batch_starts
-- The starts of a batch of the group, with the batches that share its rows, or of the batches of an Airflow run; one row per partition.
-- Without batches of retry topics: a rewind cannot go to them.
SELECT topic_id, partition, min(start_offset) AS start_offset
  FROM (SELECT * FROM tidemark.batch WHERE batch_id = %(batch_id)s
         UNION ALL
        SELECT * FROM tidemark.batch WHERE whole_batch_id = (SELECT whole_batch_id FROM tidemark.batch WHERE batch_id = %(batch_id)s)
         UNION ALL
        SELECT batch.* FROM tidemark.attempt JOIN tidemark.batch USING (attempt_id)
         WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s) batch
 WHERE group_id = %(group_id)s AND NOT drained
 GROUP BY topic_id, partition;

-- name: sink_size
-- Bytes of these tables with their indexes, and about how many rows they have. Locks nothing.
SELECT coalesce(sum(pg_total_relation_size(part.relid)), 0)::bigint, coalesce(sum(greatest(reltuples, 0)), 0)::bigint
  FROM unnest(%(tables)s::text[]) AS sink (name)
 CROSS JOIN LATERAL (SELECT to_regclass(name)::oid UNION SELECT relid::oid FROM pg_partition_tree(to_regclass(name))) part (relid)
  JOIN pg_class ON pg_class.oid = part.relid;

-- name: add_rewind
INSERT INTO tidemark.rewind (scenario, undo_of, allow_loss, backfill, beside, transform, reason, planned_by, expires_at, digest, dag_id, run_id)
VALUES (%(scenario)s, %(undo_of)s, %(allow_loss)s, %(backfill)s, %(beside)s, %(transform)s, %(reason)s, %(by)s, clock_timestamp() + %(expires_in)s,
        %(digest)s, %(dag_id)s, %(run_id)s)
RETURNING rewind_id;

-- name: add_group
INSERT INTO tidemark.rewind_group (rewind_id, group_id, consumer, group_name, sink, sinks, basis, group_state, in_flight, lag,
                                   records_per_s, announced_assets, shadow_bytes)
VALUES (%(rewind_id)s, %(group_id)s, %(consumer)s, %(group)s, %(sink)s, %(sinks)s, %(basis)s, %(state)s, %(in_flight)s, %(lag)s,
        %(records_per_s)s, %(announced_assets)s, %(shadow_bytes)s);

-- name: add_partitions
INSERT INTO tidemark.rewind_partition (rewind_id, group_id, topic_id, partition, hold, target, planned_offset, new_offset, superseded_from,
                                      planned_sink_rows, planned_failed_records)
SELECT %(rewind_id)s, %(group_id)s, *
  FROM unnest(%(topic_ids)s::smallint[], %(partitions)s::integer[], %(holds)s::boolean[], %(targets)s::bigint[], %(positions)s::bigint[],
              %(offsets)s::bigint[], %(superseded)s::bigint[], %(sink_rows)s::bigint[], %(failed_records)s::bigint[]);

-- name: moving
-- The partitions of a plan that is not stored, in place of tidemark.rewind_partition. Part of the statements below.
(SELECT %(rewind_id)s::bigint AS rewind_id, *
   FROM unnest(%(group_ids)s::integer[], %(topic_ids)s::smallint[], %(partitions)s::integer[], %(holds)s::boolean[], %(superseded)s::bigint[])
        AS move (group_id, topic_id, partition, hold, superseded_from))

-- name: count_superseded
-- Counts the rows and failed records to take out now: per partition, a range of the sink's lineage index and one of the failed records; for
-- an undo also those that come back. Locks nothing.
SELECT part.topic_id, part.partition,
       (SELECT count(*) FROM {table} written
         WHERE written.kafka_topic_id = part.topic_id AND written.kafka_partition = part.partition
           AND written.kafka_offset >= part.superseded_from) AS sink_rows,
       (SELECT count(*) FROM tidemark.failed_record record
         WHERE record.group_id = part.group_id AND record.topic_id = part.topic_id
           AND record.partition = part.partition AND record.record_offset >= part.superseded_from) AS failed_records,
       coalesce(undone.sink_rows, 0) AS rows_back, coalesce(undone.failed_records, 0) AS failed_back
  FROM {moving} part
  LEFT JOIN tidemark.rewind_partition undone ON undone.rewind_id = %(undo_of)s AND undone.group_id = part.group_id
                                            AND undone.topic_id = part.topic_id AND undone.partition = part.partition
 WHERE NOT part.hold;

-- name: announced
-- Whether an asset event has announced rows that would be taken out: batches of Airflow runs whose verdict let the event pass. Locks nothing.
SELECT EXISTS (SELECT FROM {moving} part
                 JOIN tidemark.batch ON batch.group_id = part.group_id AND batch.topic_id = part.topic_id
                      AND batch.partition = part.partition AND batch.end_offset > part.superseded_from
                      AND batch.start_offset >= coalesce((SELECT max(start_offset) FROM tidemark.batch before
                                                     WHERE before.group_id = part.group_id AND before.topic_id = part.topic_id
                                                       AND before.partition = part.partition AND before.start_offset <= part.superseded_from),
                                                   part.superseded_from)
                 JOIN tidemark.attempt USING (attempt_id)
                 JOIN tidemark.validation USING (validation_id)
                WHERE NOT part.hold AND attempt.dag_id IS NOT NULL AND (verdict <> 'critical' OR %(reports)s));

-- name: partial_batches
-- Batches that can only be taken back together and of which the rewind would take only a part; one row per partition. ``goes_from`` is null
-- for a partition that is not part of the rewind, or stays.
WITH going AS (
    SELECT * FROM {moving} part WHERE rewind_id = %(rewind_id)s AND NOT hold
), touched AS (
    SELECT DISTINCT batch.whole_batch_id
      FROM going JOIN tidemark.batch ON batch.group_id = going.group_id AND batch.topic_id = going.topic_id
                      AND batch.partition = going.partition AND batch.end_offset > going.superseded_from
                      AND batch.start_offset >= coalesce((SELECT max(start_offset) FROM tidemark.batch before
                                                     WHERE before.group_id = going.group_id AND before.topic_id = going.topic_id
                                                       AND before.partition = going.partition AND before.start_offset <= going.superseded_from),
                                                   going.superseded_from)
     WHERE batch.whole_batch_id IS NOT NULL
), placed AS (
    SELECT batch.*, going.superseded_from AS goes_from, going.superseded_from <= batch.start_offset IS TRUE AS whole
      FROM touched JOIN tidemark.batch USING (whole_batch_id)
      LEFT JOIN going ON going.group_id = batch.group_id AND going.topic_id = batch.topic_id AND going.partition = batch.partition
)
SELECT whole_batch_id, topic.name AS topic, partition, start_offset AS start, end_offset AS end, goes_from
  FROM placed JOIN tidemark.topic USING (topic_id)
 WHERE whole_batch_id IN (SELECT whole_batch_id FROM placed WHERE NOT whole)
 ORDER BY whole_batch_id, topic.name, partition;

-- name: later_rewinds
-- Later applied rewinds of the same partitions that stand: not undone, and not the undo of a rewind that also came after this one.
WITH RECURSIVE one AS (
    SELECT applied_no FROM tidemark.rewind WHERE rewind_id = %(rewind_id)s
), later AS MATERIALIZED ( -- a range with two ends, so that Postgres reads it from the index
    SELECT rewind_id FROM tidemark.rewind
     WHERE applied_no > (SELECT applied_no FROM one) AND applied_no <= (SELECT max(applied_no) FROM tidemark.rewind) AND state = 'APPLIED'
), chain AS ( -- from each one to what it undoes, to what that undoes, and so on
    SELECT rewind_id, rewind_id AS first_id, 0 AS undos FROM later
     WHERE EXISTS (SELECT FROM tidemark.rewind_partition mine JOIN tidemark.rewind_partition theirs USING (group_id, topic_id, partition)
                    WHERE mine.rewind_id = %(rewind_id)s AND theirs.rewind_id = later.rewind_id AND NOT mine.hold AND NOT theirs.hold)
     UNION ALL
    SELECT chain.rewind_id, undone.undo_of, chain.undos + 1
      FROM chain JOIN tidemark.rewind undone ON undone.rewind_id = chain.first_id WHERE undone.undo_of IS NOT NULL
)
SELECT chain.rewind_id
  FROM chain JOIN tidemark.rewind first ON first.rewind_id = chain.first_id AND first.undo_of IS NULL
 WHERE NOT (chain.undos %% 2 = 1 AND first.applied_no > (SELECT applied_no FROM one))
 ORDER BY chain.rewind_id;

-- name: lock_groups
-- Locks the groups of a rewind, so that no row overwritten since is removed until the transaction ends.
SELECT FROM tidemark.rewind_group WHERE rewind_id = %(rewind_id)s ORDER BY group_id FOR NO KEY UPDATE;

-- name: lock_archives
-- Locks the entries of a rewind's archives, so that none is removed until the transaction ends.
SELECT FROM tidemark.rewind_archive WHERE rewind_id = %(rewind_id)s AND put_back_at IS NULL ORDER BY number FOR NO KEY UPDATE;
