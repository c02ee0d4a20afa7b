-- What there is to do for a database's groups, between their runs. Locks nothing.

-- name: busy
-- Groups of which a record is to be published, or waits.
SELECT name FROM tidemark.consumer_group grp
 WHERE EXISTS (SELECT FROM tidemark.failed_record record WHERE record.group_id = grp.group_id AND state = 'WAITING')
    OR EXISTS (SELECT FROM tidemark.failed_record record
                WHERE record.group_id = grp.group_id AND hop_offset IS NULL AND hop_topic IS NOT NULL AND publish_error IS NULL
                  AND state IN ('WAITING', 'FAILED'))
 ORDER BY name;

-- name: group_id
SELECT group_id FROM tidemark.consumer_group WHERE name = %(group)s;

-- name: lateness
-- Of the records of a group that are due: how many they are, and for how long they have been.
SELECT count(*) AS records, percentile_disc(0.5) WITHIN GROUP (ORDER BY now - due_at) AS median,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY now - due_at) AS p99, max(now - due_at) AS oldest
  FROM tidemark.failed_record, (SELECT clock_timestamp() AS now) now
 WHERE group_id = %(group_id)s AND state = 'WAITING' AND due_at <= now;
