-- Statements that add columns to a sink.

-- name: take_turns
-- Waits for other members that add columns to this table, until the commit.
SELECT pg_advisory_xact_lock(%(class)s, hashtext(%(table)s));

-- name: owner
-- The table's owner, and whether the session's role has its rights. Locks nothing.
SELECT pg_get_userbyid(relowner), pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass(%(quoted)s);

-- name: note
-- Stores the columns that an attempt has added; a trigger writes the event.
UPDATE tidemark.attempt SET columns_added = coalesce(columns_added, '[]') || jsonb_build_object('table', %(table)s, 'columns', %(columns)s::text[])
 WHERE attempt_id = %(attempt_id)s;

-- name: holders
-- Sessions that use the table, or that add columns to it. Locks nothing. Not every role may see when another role's session began its
-- transaction.
SELECT DISTINCT pid, application_name, usename, date_trunc('second', xact_start)
  FROM pg_locks held JOIN pg_stat_activity USING (pid)
 WHERE held.granted AND pid <> pg_backend_pid() AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND (held.relation = to_regclass(%(quoted)s)
        OR held.locktype = 'advisory' AND held.objsubid = 2 AND held.classid = %(class)s AND held.objid::bigint::bit(32) = hashtext(%(table)s)::bit(32))
 ORDER BY pid;
