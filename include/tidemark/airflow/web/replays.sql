-- Statements on replays beside. They lock nothing.

-- name: held
-- Until when a rewind holds its groups for its swap. No row: it does not.
SELECT hold_until FROM tidemark.rewind WHERE rewind_id = %(rewind_id)s AND hold_until > clock_timestamp();

-- name: failing
-- The expectations that these validations have failed, as texts.
SELECT validation_id, array_agg(coalesce(detail ->> 'text', expectation) ORDER BY number) AS texts
  FROM tidemark.validation_result
 WHERE validation_id = ANY (%(validation_ids)s::bigint[]) AND NOT success GROUP BY validation_id;
