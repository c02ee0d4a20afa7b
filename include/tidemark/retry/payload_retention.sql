-- Statements that delete payloads after their retention.

-- name: empty
-- Deletes the payloads, and the originals before edits, of the next records that were settled this long ago. Locks them and skips locked
-- ones. Returns the last record's time of settlement, and the number of records.
WITH settled AS MATERIALIZED (
    SELECT failed_record_id, changed_at FROM tidemark.failed_record
     WHERE changed_at >= %(after)s::timestamptz AND changed_at < (SELECT clock_timestamp() - %(keep)s)
       AND state IN ('LOADED', 'SKIPPED', 'DISCARDED') AND emptied_at IS NULL
     ORDER BY changed_at LIMIT %(records)s
       FOR UPDATE SKIP LOCKED
), emptied AS (
    UPDATE tidemark.failed_record record SET key = NULL, value = NULL, headers = '[]', emptied_at = clock_timestamp()
      FROM settled WHERE record.failed_record_id = settled.failed_record_id
), edits AS (
    UPDATE tidemark.failed_record_edit edit SET key = NULL, value = NULL, headers = '[]'
      FROM settled WHERE edit.failed_record_id = settled.failed_record_id
)
SELECT max(changed_at) AS last, count(*) AS records FROM settled;
