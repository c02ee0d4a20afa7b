-- Statements for redrives. {where} is the condition of a Filter on `record`. Lock order: the group's advisory lock (in a transaction of its
-- own), the advisory lock against rewinds, the redrive's row, records in id order.

-- name: lock_group
-- One redrive of a group at a time. The transaction stays open, so the lock is released whenever the process ends. False: another holds it.
SELECT pg_try_advisory_xact_lock(%(class)s, %(group_id)s);

-- name: matching
-- How many records `add` would choose without a limit. Locks nothing.
SELECT count(*) FROM tidemark.failed_record record
 WHERE group_id = %(group_id)s AND {where} AND redrives < %(max_redrives)s
   AND (state = 'FAILED' OR (state = 'WAITING' AND publish_error IS NOT NULL) OR (state = 'DISCARDED' AND %(discarded)s));

-- name: add
-- Stores a redrive and fixes its set of records: the matching ones that can be redriven. Locks nothing.
WITH chosen AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.failed_record record
     WHERE group_id = %(group_id)s AND {where} AND redrives < %(max_redrives)s
       AND (state = 'FAILED' OR (state = 'WAITING' AND publish_error IS NOT NULL) OR (state = 'DISCARDED' AND %(discarded)s))
     ORDER BY failed_record_id LIMIT %(limit)s
), added AS (
    INSERT INTO tidemark.redrive (group_id, consumer, destination, filter, per_second, max_redrives, reason, planned_by, dag_id, run_id, digest)
    SELECT %(group_id)s, %(consumer)s, %(destination)s, %(filter)s::jsonb, %(per_second)s::integer, %(max_redrives)s, %(reason)s, %(by)s,
           %(dag_id)s, %(run_id)s, tidemark.redrive_digest(%(consumer)s::text, %(destination)s::text, %(filter)s::jsonb, %(per_second)s::integer,
                                                           %(max_redrives)s::integer, coalesce(array_agg(failed_record_id ORDER BY failed_record_id), ARRAY[]::bigint[]))
      FROM chosen
    RETURNING redrive_id
), noted AS (
    INSERT INTO tidemark.redrive_record (redrive_id, failed_record_id) SELECT redrive_id, failed_record_id FROM added, chosen
)
SELECT redrive_id FROM added;

-- name: of_run
-- The first redrive planned by an Airflow run. Locks nothing.
SELECT redrive_id FROM tidemark.redrive WHERE dag_id = %(dag_id)s AND run_id = %(run_id)s ORDER BY redrive_id LIMIT 1;

-- name: digest
-- The digest of the stored redrive. Locks nothing.
SELECT tidemark.redrive_digest(consumer, destination, filter, per_second, max_redrives,
                               (SELECT array_agg(failed_record_id ORDER BY failed_record_id) FROM tidemark.redrive_record record
                                 WHERE record.redrive_id = redrive.redrive_id))
  FROM tidemark.redrive WHERE redrive_id = %(redrive_id)s;

-- name: left_out
-- Matching records that are not included: how many already wait for a retry, how many have reached the limit of redrives. Locks nothing.
SELECT count(*) FILTER (WHERE state = 'HELD' OR (state = 'WAITING' AND publish_error IS NULL)) AS waiting,
       count(*) FILTER (WHERE state = 'FAILED' AND redrives >= %(max_redrives)s) AS worn_out
  FROM tidemark.failed_record record
 WHERE group_id = %(group_id)s AND {where} AND state IN ('WAITING', 'HELD', 'FAILED')
   AND NOT EXISTS (SELECT FROM tidemark.redrive_record chosen
                    WHERE chosen.redrive_id = %(redrive_id)s AND chosen.failed_record_id = record.failed_record_id);

-- name: read
-- Redrives of a group, or a single one, with the number of records in each state, newest first. Locks nothing.
SELECT redrive.redrive_id, redrive.state, consumer, grp.name AS "group", destination, filter, per_second, max_redrives, reason, planned_by,
       planned_at, started_at, ended_at, approved_by, digest, coalesce(planned, 0) AS planned, coalesce(redriven, 0) AS redriven,
       coalesce(passed_over, 0) AS passed_over
  FROM tidemark.redrive JOIN tidemark.consumer_group grp USING (group_id)
  LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE record.state = 'PLANNED') AS planned, count(*) FILTER (WHERE record.state = 'REDRIVEN') AS redriven,
           count(*) FILTER (WHERE record.state = 'PASSED OVER') AS passed_over
      FROM tidemark.redrive_record record WHERE record.redrive_id = redrive.redrive_id
 ) counted ON true
 WHERE (redrive.redrive_id = %(redrive_id)s OR %(redrive_id)s::bigint IS NULL) AND (grp.name = %(group)s OR %(group)s::text IS NULL)
 ORDER BY redrive.redrive_id DESC LIMIT %(limit)s;

-- name: by_error
-- A redrive's records by error type. Locks nothing.
SELECT coalesce(error_type, '(withdrawn)') AS error_type, count(*) AS records, (array_agg(error_text ORDER BY failed_record_id))[1] AS example
  FROM tidemark.redrive_record LEFT JOIN tidemark.failed_record USING (failed_record_id)
 WHERE redrive_id = %(redrive_id)s GROUP BY 1 ORDER BY records DESC, 1;

-- name: by_topic
SELECT topic.name AS topic, count(*) AS records FROM tidemark.redrive_record
  JOIN tidemark.failed_record USING (failed_record_id) JOIN tidemark.topic USING (topic_id)
 WHERE redrive_id = %(redrive_id)s GROUP BY 1 ORDER BY records DESC, 1;

-- name: examples
SELECT failed_record_id AS number, topic.name AS topic, partition, record_offset AS offset, error_type, error_text
  FROM tidemark.redrive_record JOIN tidemark.failed_record USING (failed_record_id) JOIN tidemark.topic USING (topic_id)
 WHERE redrive_id = %(redrive_id)s ORDER BY failed_record_id LIMIT %(limit)s;

-- name: passed_over
-- Why records were passed over. Locks nothing.
SELECT why, count(*) AS records FROM tidemark.redrive_record
 WHERE redrive_id = %(redrive_id)s AND state = 'PASSED OVER' GROUP BY why ORDER BY records DESC, why;

-- name: start
-- Locks the redrive's row. No row returned: it is already done.
UPDATE tidemark.redrive SET state = 'RUNNING', started_at = coalesce(started_at, clock_timestamp()),
       approved_by = coalesce(%(approved_by)s, approved_by)
 WHERE redrive_id = %(redrive_id)s AND state <> 'DONE' RETURNING redrive_id;

-- name: state
-- Locks the redrive's row, so that a stop takes effect either before or after this portion.
SELECT state FROM tidemark.redrive WHERE redrive_id = %(redrive_id)s FOR UPDATE;

-- name: stop
-- Locks the redrive's row.
UPDATE tidemark.redrive SET state = 'STOPPED' WHERE redrive_id = %(redrive_id)s AND state = 'RUNNING';

-- name: end
UPDATE tidemark.redrive SET state = 'DONE', ended_at = clock_timestamp() WHERE redrive_id = %(redrive_id)s;

-- name: send
-- The next portion: records that can still be redriven become WAITING, not yet published; the others are passed over, with the reason.
-- A record's last error is appended to its story. Locks only the records that are redriven, never one that a drain may be trying. Returns
-- the number of each.
WITH portion AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.redrive_record
     WHERE redrive_id = %(redrive_id)s AND state = 'PLANNED' ORDER BY failed_record_id LIMIT %(records)s
), locked AS MATERIALIZED (
    SELECT record.failed_record_id, record.redrives FROM tidemark.failed_record record
     WHERE failed_record_id IN (SELECT failed_record_id FROM portion)
       AND (state = 'FAILED' OR (state = 'WAITING' AND publish_error IS NOT NULL)
            OR (state = 'DISCARDED' AND emptied_at IS NULL AND %(discarded)s))
     ORDER BY failed_record_id FOR UPDATE
), judged AS MATERIALIZED (
    SELECT failed_record_id,
           CASE WHEN locked.redrives < %(max_redrives)s THEN NULL
                WHEN locked.redrives IS NOT NULL THEN 'was redriven ' || locked.redrives || ' times'
                WHEN record.state IS NULL THEN 'withdrawn by a rewind'
                WHEN record.state = 'WAITING' THEN 'waits for a retry'
                WHEN record.state = 'HELD' THEN 'is held behind another record of its key'
                WHEN record.state = 'FAILED' THEN 'was changed meanwhile'
                WHEN record.state = 'DISCARDED' AND record.emptied_at IS NOT NULL THEN 'its payload was emptied'
                ELSE 'was ' || lower(record.state) || ' meanwhile' END AS why
      FROM portion LEFT JOIN tidemark.failed_record record USING (failed_record_id) LEFT JOIN locked USING (failed_record_id)
), sent AS (
    UPDATE tidemark.failed_record record
       SET state = 'WAITING', retry_number = %(number)s, due_at = clock_timestamp() + %(delay)s::interval, retry_topic = %(topic)s,
           retry_topic_id = NULL, retry_partition = NULL, retry_offset = NULL, publish_error = NULL,
           story = story || jsonb_build_object('number', CASE WHEN state = 'WAITING' THEN retry_number - 1 ELSE retry_number END,
                                               'type', error_type, 'text', error_text, 'attempt_id', attempt_id, 'at', changed_at),
           error_type = %(error_type)s, error_text = %(error_text)s, redrives = redrives + 1, action_id = %(action_id)s,
           ladder_at = clock_timestamp(), changed_at = clock_timestamp()
      FROM judged WHERE record.failed_record_id = judged.failed_record_id AND judged.why IS NULL
), noted AS (
    UPDATE tidemark.redrive_record record
       SET state = CASE WHEN judged.why IS NULL THEN 'REDRIVEN' ELSE 'PASSED OVER' END, why = judged.why,
           action_id = CASE WHEN judged.why IS NULL THEN %(action_id)s::bigint END, done_at = clock_timestamp()
      FROM judged WHERE record.redrive_id = %(redrive_id)s AND record.failed_record_id = judged.failed_record_id
)
SELECT count(*) FILTER (WHERE why IS NULL) AS sent, count(why) AS passed_over FROM judged;

-- name: count_sent
UPDATE tidemark.retry_action SET records = records + %(records)s WHERE action_id = %(action_id)s;
