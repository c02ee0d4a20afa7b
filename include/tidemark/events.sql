-- Statements on the audit log.

-- name: last
-- The newest event. Locks nothing.
SELECT coalesce(max(event_id), 0) FROM tidemark.audit_event;

-- name: writers
-- Unfinished transactions that have written events, or are about to. Locks nothing.
SELECT DISTINCT virtualtransaction FROM pg_locks
 WHERE locktype = 'relation' AND relation = 'tidemark.audit_event'::regclass AND mode = 'RowExclusiveLock'
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: read
-- Events from a time on, after one and up to one (null: all), of one group (null: all), oldest first. Locks nothing.
SELECT event_id, at, kind, group_name AS "group", database_role, claimed_by, dag_id, run_id, plan, digest, reason, details
  FROM tidemark.audit_event
 WHERE (%(since)s::timestamptz IS NULL OR at >= %(since)s)
   AND (%(after)s::bigint IS NULL OR event_id > %(after)s) AND (%(last)s::bigint IS NULL OR event_id <= %(last)s)
   AND (%(group)s::text IS NULL OR group_name = %(group)s)
 ORDER BY event_id;

-- name: newest
-- The newest events of these groups, and of the whole database if %(whole)s. Locks nothing.
SELECT event_id, at, kind, group_name AS "group", database_role, claimed_by, dag_id, run_id, plan, digest, reason, details
  FROM tidemark.audit_event
 WHERE (group_name = ANY (%(groups)s) OR (%(whole)s AND group_name IS NULL))
   AND (%(kind)s::text IS NULL OR kind LIKE %(kind)s)
   AND (%(person)s::text IS NULL OR claimed_by ILIKE %(person)s OR database_role ILIKE %(person)s)
 ORDER BY event_id DESC LIMIT %(limit)s;
