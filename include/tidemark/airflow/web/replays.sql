-- Statements on replays beside. They lock nothing.

-- name: rewind
-- Who began the replay beside of a rewind, in which DAG run, and until when it is kept and holds its groups.
SELECT rewind_id, dag_id, run_id, transform, started_by, started_at, started_at + %(keep)s AS kept_until,
       CASE WHEN hold_until > clock_timestamp() THEN hold_until END AS held_until
  FROM tidemark.rewind WHERE rewind_id = %(rewind_id)s;

-- name: failing
-- The expectations that these validations have failed, as texts.
SELECT validation_id, array_agg(coalesce(detail ->> 'text', expectation) ORDER BY number) AS texts
  FROM tidemark.validation_result
 WHERE validation_id = ANY (%(validation_ids)s::bigint[]) AND NOT success GROUP BY validation_id;
