-- name: holders
-- Sessions that hold the advisory lock of a group's rewinds, or that have written a position in a transaction that is still open. Locks
-- nothing. Not every role may see when another role's session began its transaction.
SELECT DISTINCT pid, application_name, usename, date_trunc('second', xact_start)
  FROM pg_locks held JOIN pg_stat_activity USING (pid)
 WHERE held.granted AND pid <> pg_backend_pid()
   AND (held.locktype = 'advisory' AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND held.classid = %(class)s AND held.objid = %(group_id)s AND held.objsubid = 2
        OR held.locktype = 'transactionid'
        AND held.transactionid IN (SELECT part.xmax FROM tidemark.partition_offset part
                                    WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s))
 ORDER BY pid;

-- name: writers
-- Committing sessions that have written a position in a transaction that is still open; with ``end``, ends them. Locks nothing.
SELECT CASE WHEN %(end)s THEN pg_terminate_backend(pid) END
  FROM tidemark.partition_offset part
  JOIN pg_locks held ON held.locktype = 'transactionid' AND held.transactionid = part.xmax AND held.granted
  JOIN pg_stat_activity USING (pid)
 WHERE part.group_id = %(group_id)s AND part.topic_id = %(topic_id)s AND part.partition = %(partition)s
   AND pid <> pg_backend_pid() AND application_name LIKE 'tidemark/%%';
