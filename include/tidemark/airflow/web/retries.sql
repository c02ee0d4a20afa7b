-- Statements of the view of retries. They lock nothing.

-- name: open
-- Records of each of these groups that are not settled, at most %(most)s of a group: counts by state and error type, largest first, with
-- the number of different texts and the newest one. ``last``: the last failure, of a first try or a later one.
SELECT counted.group, counted.state, counted.error_type, records, texts, last, newest.error_text AS example
  FROM (SELECT grp.name AS "group", record.state, error_type, count(*) AS records, count(DISTINCT error_text) AS texts,
               max(coalesce(tried_at, record.created_at)) AS last, max(failed_record_id) AS newest
          FROM tidemark.consumer_group grp
         CROSS JOIN LATERAL (SELECT state, error_type, error_text, created_at, tried_at, failed_record_id FROM tidemark.failed_record
                              WHERE group_id = grp.group_id AND state = ANY (%(states)s) LIMIT %(most)s) record
         WHERE grp.name = ANY (%(groups)s) GROUP BY grp.name, record.state, error_type) counted
  JOIN tidemark.failed_record newest ON newest.failed_record_id = counted.newest
 ORDER BY counted.group, records DESC, counted.state, counted.error_type;

-- name: growth
-- How many records of these groups that are not settled first failed in the last hour and in the hour before, by error type.
SELECT grp.name AS group, error_type,
       count(*) FILTER (WHERE record.created_at >= (SELECT clock_timestamp()) - interval '1 hour') AS last_hour,
       count(*) FILTER (WHERE record.created_at < (SELECT clock_timestamp()) - interval '1 hour') AS hour_before
  FROM tidemark.consumer_group grp JOIN tidemark.failed_record record USING (group_id)
 WHERE grp.name = ANY (%(groups)s) AND record.state = ANY (%(states)s)
   AND record.created_at >= (SELECT clock_timestamp()) - interval '2 hours'
 GROUP BY grp.name, error_type;
