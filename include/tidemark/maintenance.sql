-- Statements on the record of maintenance runs.

-- name: begin
INSERT INTO tidemark.maintenance (done_by, dag_id, run_id, keep) VALUES (%(by)s, %(dag_id)s, %(run_id)s, %(keep)s) RETURNING maintenance_id;

-- name: end
-- Locks its row.
UPDATE tidemark.maintenance
   SET ended_at = clock_timestamp(), archives = %(archives)s, rows = %(rows)s, payloads = %(payloads)s
 WHERE maintenance_id = %(maintenance_id)s;
