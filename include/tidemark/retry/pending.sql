-- The work for a database's groups between their runs. Locks nothing.

-- name: busy
-- Groups with records to publish, waiting or held.
SELECT name FROM tidemark.consumer_group grp
 WHERE EXISTS (SELECT FROM tidemark.failed_record record WHERE record.group_id = grp.group_id AND state = 'WAITING')
    OR EXISTS (SELECT FROM tidemark.failed_record record WHERE record.group_id = grp.group_id AND state = 'HELD')
    OR EXISTS (SELECT FROM tidemark.failed_record record
                WHERE record.group_id = grp.group_id AND retry_offset IS NULL AND retry_topic IS NOT NULL AND publish_error IS NULL
                  AND state IN ('WAITING', 'FAILED'))
 ORDER BY name;

-- name: lateness
-- The number of a group's due records, and the time since they came due.
SELECT count(*) AS records, percentile_disc(0.5) WITHIN GROUP (ORDER BY now - due_at) AS median,
       percentile_disc(0.99) WITHIN GROUP (ORDER BY now - due_at) AS p99, max(now - due_at) AS oldest
  FROM tidemark.failed_record, (SELECT clock_timestamp() AS now) now
 WHERE group_id = %(group_id)s AND state = 'WAITING' AND due_at <= now;

-- name: tried
-- The number of a group's records tried in the last 24 hours, and the lateness of each one's last try.
SELECT count(*) AS records, make_interval(secs => percentile_disc(0.5) WITHIN GROUP (ORDER BY tried_late)) AS median,
       make_interval(secs => percentile_disc(0.99) WITHIN GROUP (ORDER BY tried_late)) AS p99,
       make_interval(secs => max(tried_late)) AS longest
  FROM tidemark.failed_record JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.name = %(group)s AND tried_at > clock_timestamp() - interval '24 hours';
