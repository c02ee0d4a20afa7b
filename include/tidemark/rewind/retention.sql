-- Statements that remove archives whose time is over.

-- name: outdated
-- Archives of rewinds that were applied this long ago.
SELECT rewind_id, number, relation, rows FROM tidemark.rewind_archive JOIN tidemark.rewind USING (rewind_id)
 WHERE put_back_at IS NULL AND removed_at IS NULL AND applied_at < clock_timestamp() - %(keep)s
 ORDER BY rewind_id, number;

-- name: remove
-- Notes that an archive is gone. Locks its row. No row returned: an undo has put it back meanwhile.
UPDATE tidemark.rewind_archive SET removed_at = clock_timestamp()
 WHERE rewind_id = %(rewind_id)s AND number = %(number)s AND put_back_at IS NULL AND removed_at IS NULL RETURNING 1;
