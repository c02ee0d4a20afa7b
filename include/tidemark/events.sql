-- Statements on the audit log.

-- name: read
-- Events from a time on (null: all), of one group (null: all), oldest first. Locks nothing.
SELECT event_id, at, kind, group_name AS "group", database_role, claimed_by, dag_id, run_id, plan, digest, reason, details
  FROM tidemark.audit_event
 WHERE (%(since)s::timestamptz IS NULL OR at >= %(since)s) AND (%(group)s::text IS NULL OR group_name = %(group)s)
 ORDER BY event_id;

-- name: newest
-- The newest events of these groups, and of the whole database if %(whole)s, before one (null: the newest of all). Locks nothing.
SELECT event_id, at, kind, group_name AS "group", database_role, claimed_by, dag_id, run_id, plan, digest, reason, details
  FROM tidemark.audit_event
 WHERE (group_name = ANY (%(groups)s) OR (%(whole)s AND group_name IS NULL))
   AND (%(kind)s::text IS NULL OR kind LIKE %(kind)s)
   AND (%(person)s::text IS NULL OR claimed_by ILIKE %(person)s OR database_role ILIKE %(person)s)
   AND (%(before)s::bigint IS NULL OR event_id < %(before)s)
 ORDER BY event_id DESC LIMIT %(limit)s;
