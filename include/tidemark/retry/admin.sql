-- Statements for operators' reads and actions. {where} is the condition of a Filter on `record`. Lock order: the group's advisory lock
-- against rewinds, then records by message offset, as drains lock them.

-- name: records
-- The matching records after a given one, without payloads, in id order. Locks nothing.
SELECT failed_record_id AS number, state, topic.name AS topic, record.partition, record_offset AS offset, record_timestamp AS timestamp,
       retry_number, due_at, due_at <= clock_timestamp() AS due, retry_topic, retry_partition, retry_offset, publish_error, error_type, error_text,
       redrives, created_at, changed_at, coalesce(octet_length(value), 0) AS value_bytes,
       (SELECT count(*) FROM jsonb_array_elements(story) earlier WHERE earlier ->> 'type' <> 'Redriven')
         + (state <> 'HELD' AND error_type <> 'Redriven')::integer AS failures
  FROM tidemark.failed_record record JOIN tidemark.topic USING (topic_id)
 WHERE group_id = %(group_id)s AND failed_record_id > %(after)s AND {where}
 ORDER BY failed_record_id LIMIT %(limit)s;

-- name: counts
-- Counts by state and error type, largest first, with the newest error text and the number of different texts. ``last``:
-- the last failure, of a first try or a later one. Locks nothing.
SELECT state, error_type, count(*) AS records, count(DISTINCT error_text) AS texts, min(created_at) AS first,
       max(coalesce(tried_at, created_at)) AS last,
       (array_agg(error_text ORDER BY failed_record_id DESC))[1] AS example,
       count(*) FILTER (WHERE publish_error IS NOT NULL) AS refused
  FROM tidemark.failed_record record
 WHERE group_id = %(group_id)s AND {where}
 GROUP BY state, error_type ORDER BY records DESC, state, error_type;

-- name: whole
-- The matching records after a given one, with all columns. Locks nothing.
SELECT failed_record_id AS number, state, topic.name AS topic, record.partition, record_offset AS offset, record_timestamp AS timestamp,
       key, value, headers, disposition, error_type, error_text, attempt_id, retry_number, due_at, retry_topic, retry_partition, retry_offset,
       publish_error, story, sink_rows, redrives, created_at, changed_at, ladder_at, tried_at, tried_late, emptied_at
  FROM tidemark.failed_record record JOIN tidemark.topic USING (topic_id)
 WHERE group_id = %(group_id)s AND failed_record_id > %(after)s AND {where}
 ORDER BY failed_record_id LIMIT %(limit)s;

-- name: edits
-- A record's payload before each of its edits, oldest first. Locks nothing.
SELECT action_id, done_by AS by, done_at AS at, reason, edit.key, edit.value, edit.headers
  FROM tidemark.failed_record_edit edit JOIN tidemark.retry_action USING (action_id)
 WHERE failed_record_id = %(number)s ORDER BY action_id;

-- name: last_action
SELECT action.action_id, kind, done_by AS by, done_at AS at, reason
  FROM tidemark.failed_record JOIN tidemark.retry_action action USING (action_id) WHERE failed_record_id = %(number)s;

-- name: redrives
-- The redrives that include a record. Locks nothing.
SELECT redrive_id, redrive_record.state, why, destination, reason, planned_by AS by, done_at AS at
  FROM tidemark.redrive_record JOIN tidemark.redrive USING (redrive_id) WHERE failed_record_id = %(number)s ORDER BY redrive_id;

-- name: add_action
INSERT INTO tidemark.retry_action (group_id, kind, filter, reason, done_by, records)
VALUES (%(group_id)s, %(kind)s, %(filter)s, %(reason)s, %(by)s, %(records)s) RETURNING action_id;

-- name: to_discard
-- How many records a discard would settle, and a digest of their numbers. Locks nothing.
SELECT count(*), md5(coalesce(string_agg(failed_record_id::text, ',' ORDER BY failed_record_id), ''))
  FROM tidemark.failed_record record WHERE group_id = %(group_id)s AND state IN ('WAITING', 'HELD', 'FAILED') AND {where};

-- name: discard
-- Discards records that are waiting, held or failed; returns their count and digest, as `to_discard`. Their messages stay in the retry
-- topics; drains skip them. Locks the records.
WITH meant AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.failed_record record
     WHERE group_id = %(group_id)s AND state IN ('WAITING', 'HELD', 'FAILED') AND {where}
     ORDER BY retry_topic_id, retry_partition, retry_offset, failed_record_id FOR UPDATE
), settled AS (
    UPDATE tidemark.failed_record record
       SET state = 'DISCARDED', due_at = NULL, action_id = %(action_id)s, changed_at = clock_timestamp()
      FROM meant WHERE record.failed_record_id = meant.failed_record_id
    RETURNING record.failed_record_id
)
SELECT count(*), md5(coalesce(string_agg(failed_record_id::text, ',' ORDER BY failed_record_id), '')) FROM settled;

-- name: discarded
-- The number of records that an earlier call for the same reason and person has discarded. No row unless they are exactly the records of the
-- digest, and still discarded.
SELECT records FROM tidemark.retry_action action
 WHERE group_id = %(group_id)s AND kind = 'DISCARD' AND reason = %(reason)s AND done_by = %(by)s
   AND %(only)s = (SELECT md5(string_agg(failed_record_id::text, ',' ORDER BY failed_record_id))
                     FROM tidemark.failed_record record WHERE record.action_id = action.action_id AND state = 'DISCARDED')
 ORDER BY action_id DESC LIMIT 1;

-- name: count_action
UPDATE tidemark.retry_action SET records = %(records)s WHERE action_id = %(action_id)s;

-- name: lock_records
SELECT failed_record_id FROM tidemark.failed_record
 WHERE group_id = %(group_id)s AND failed_record_id = ANY (%(numbers)s)
 ORDER BY retry_topic_id, retry_partition, retry_offset, failed_record_id FOR UPDATE;

-- name: original
-- Needs the record's lock.
SELECT state, key, value, headers, publish_error FROM tidemark.failed_record
 WHERE group_id = %(group_id)s AND failed_record_id = %(number)s;

-- name: keep_original
INSERT INTO tidemark.failed_record_edit (action_id, failed_record_id, key, value, headers)
SELECT %(action_id)s, failed_record_id, key, value, headers FROM tidemark.failed_record WHERE failed_record_id = %(number)s;

-- name: edit
-- Needs the record's lock. Clears publish_error: the broker may accept the edited record.
UPDATE tidemark.failed_record SET key = %(key)s, value = %(value)s, headers = %(headers)s, publish_error = NULL, action_id = %(action_id)s
 WHERE failed_record_id = %(number)s;

-- name: actions
-- The operators' actions, newest first. Locks nothing.
SELECT action_id, kind, filter, reason, done_by AS by, done_at AS at, records FROM tidemark.retry_action
 WHERE group_id = %(group_id)s ORDER BY action_id DESC LIMIT %(limit)s;

-- name: due_by_tier
-- Waiting records by topic and due time, in buckets of %(seconds)s from now; bucket 0 is already due, the last one includes all later
-- records, held records have none. Locks nothing.
SELECT coalesce(retry_topic, '') AS topic, state,
       least(greatest(ceil(extract(epoch FROM due_at - now) / %(seconds)s), 0), %(buckets)s)::integer AS bucket,
       count(*) AS records, min(due_at) AS first, max(due_at) AS last
  FROM tidemark.failed_record, (SELECT clock_timestamp() AS now) now
 WHERE group_id = %(group_id)s AND state IN ('WAITING', 'HELD')
 GROUP BY 1, 2, 3 ORDER BY 1, 2, 3;
