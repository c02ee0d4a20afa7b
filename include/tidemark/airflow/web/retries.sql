-- Statements of the view of retries. They lock nothing.

-- name: growth
-- How many records of these groups first failed in the last hour and in the hour before, by error type, settled since or not.
SELECT grp.name AS group, error_type,
       count(*) FILTER (WHERE record.created_at >= now.at - interval '1 hour') AS last_hour,
       count(*) FILTER (WHERE record.created_at < now.at - interval '1 hour') AS hour_before
  FROM (SELECT clock_timestamp() AS at) now
 CROSS JOIN tidemark.consumer_group grp JOIN tidemark.failed_record record USING (group_id)
 WHERE grp.name = ANY (%(groups)s) AND record.created_at >= now.at - interval '2 hours'
 GROUP BY grp.name, error_type;
