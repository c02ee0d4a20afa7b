-- Statements on the rows of rewinds, which are kept permanently.

-- name: read_rewinds
-- One rewind, or the newest ones of these consumers and in this state (null: of all consumers, in any state). A plan that can no longer be
-- applied is EXPIRED. Locks nothing.
SELECT rewind_id, state, scenario, undo_of, allow_loss, reason, planned_by, planned_at, expires_at, digest, dag_id, run_id,
       decided_by, decided_at, applied_by, applied_at, backfill, beside, transform, started_by, started_at
  FROM tidemark.rewind
 WHERE CASE WHEN %(rewind_id)s::bigint IS NOT NULL THEN rewind_id = %(rewind_id)s
            ELSE rewind_id = ANY (ARRAY(
                SELECT DISTINCT rewind_id FROM tidemark.rewind JOIN tidemark.rewind_group USING (rewind_id)
                 WHERE (%(consumers)s::text[] IS NULL OR consumer = ANY (%(consumers)s))
                   AND (%(state)s::text IS NULL
                        OR CASE WHEN state = 'PLANNED' AND expires_at <= clock_timestamp() THEN 'EXPIRED' ELSE state END = %(state)s)
                 ORDER BY rewind_id DESC LIMIT %(limit)s)) END
 ORDER BY rewind_id DESC LIMIT %(limit)s;

-- name: of_run
-- The first rewind that an Airflow run planned. Locks nothing.
SELECT rewind_id FROM tidemark.rewind WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s ORDER BY rewind_id LIMIT 1;

-- name: read_groups
-- The consumers of these rewinds. Locks nothing.
SELECT rewind_id, group_id, consumer, group_name AS group, coalesce(sinks, ARRAY[sink]) AS tables, group_state, in_flight, lag,
       records_per_s, announced_assets, basis, shadow_bytes
  FROM tidemark.rewind_group WHERE rewind_id = ANY (%(rewind_ids)s::bigint[]) ORDER BY rewind_id, consumer;

-- name: read_partitions
-- The partitions of these rewinds: planned numbers, actual ones once applied; for an undo also the rows that come back. Locks nothing.
SELECT rewind_id, group_id, topic.name AS topic, topic_id, topic.kafka_uuid, partition, coalesce(old_offset, planned_offset) AS old, target,
       new_offset AS new, superseded_from, hold,
       coalesce(part.sink_rows, planned_sink_rows) AS sink_rows,
       coalesce(part.failed_records, planned_failed_records) AS failed_records,
       coalesce(undone.sink_rows, 0) AS rows_back, coalesce(undone.failed_records, 0) AS failed_back
  FROM tidemark.rewind_partition part JOIN tidemark.topic USING (topic_id) JOIN tidemark.rewind USING (rewind_id)
  LEFT JOIN LATERAL (SELECT sink_rows, failed_records FROM tidemark.rewind_partition before
                      WHERE before.rewind_id = rewind.undo_of AND before.group_id = part.group_id AND before.topic_id = part.topic_id
                        AND before.partition = part.partition) undone ON true
 WHERE rewind_id = ANY (%(rewind_ids)s::bigint[])
 ORDER BY rewind_id, group_id, topic.name, partition;

-- name: read_totals
-- The sums of these rewinds' partitions, as `tidemark.rewind.plan_text.totals` computes them. Locks nothing. Braces: the partitions.
SELECT rewind_id, count(partition)::integer AS partitions,
       coalesce(sum(greatest(old - new, 0)), 0)::bigint AS replay, coalesce(sum(greatest(new - old, 0)), 0)::bigint AS skip,
       coalesce(sum(sink_rows), 0)::bigint AS sink_rows, coalesce(sum(failed_records), 0)::bigint AS failed_records,
       coalesce(sum(rows_back), 0)::bigint AS rows_back, coalesce(sum(failed_back), 0)::bigint AS failed_back
  FROM unnest(%(rewind_ids)s::bigint[]) rewind_id LEFT JOIN ({partitions}) part USING (rewind_id) GROUP BY rewind_id;

-- name: reject
-- Rejects a plan. Locks its row. Returns no row if it was already decided or does not exist.
UPDATE tidemark.rewind SET state = 'REJECTED', decided_by = %(by)s, decided_at = clock_timestamp()
 WHERE rewind_id = %(rewind_id)s AND state = 'PLANNED' RETURNING rewind_id;

-- name: approve
-- Stores who approved a swap. Locks the rewind's row. Returns no row without a replay beside.
UPDATE tidemark.rewind SET decided_by = coalesce(decided_by, %(by)s), decided_at = coalesce(decided_at, clock_timestamp())
 WHERE rewind_id = %(rewind_id)s AND state = 'BESIDE' RETURNING rewind_id;
