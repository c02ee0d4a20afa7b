-- Statements that delete payloads that are no longer needed.

-- name: empty
-- Deletes the payloads, and the originals before edits, of the next records after a given one that were settled this long ago. Locks them
-- and skips locked ones. Returns the number of the last record, and how many there were.
WITH settled AS MATERIALIZED (
    SELECT failed_record_id FROM tidemark.failed_record
     WHERE failed_record_id > %(after)s AND state IN ('LOADED', 'SKIPPED', 'DISCARDED') AND emptied_at IS NULL
       AND changed_at < clock_timestamp() - %(keep)s
     ORDER BY failed_record_id LIMIT %(records)s
       FOR UPDATE SKIP LOCKED
), emptied AS (
    UPDATE tidemark.failed_record record SET key = NULL, value = NULL, headers = '[]', emptied_at = clock_timestamp()
      FROM settled WHERE record.failed_record_id = settled.failed_record_id
), edits AS (
    UPDATE tidemark.failed_record_edit edit SET key = NULL, value = NULL, headers = '[]'
      FROM settled WHERE edit.failed_record_id = settled.failed_record_id
)
SELECT coalesce(max(failed_record_id), 0) AS last, count(*) AS records FROM settled;
