-- Statements on the audit log.

-- name: read
-- Events from a time on (null: all), of one group (null: all), oldest first. Locks nothing.
SELECT event_id, at, kind, group_name AS "group", database_role, claimed_by, dag_id, run_id, plan, digest, reason, details
  FROM tidemark.audit_event
 WHERE (%(since)s::timestamptz IS NULL OR at >= %(since)s) AND (%(group)s::text IS NULL OR group_name = %(group)s)
 ORDER BY event_id;
