-- Statements that remove old archives.

-- name: outdated
-- Archives of rewinds that were applied longer ago than `keep`.
SELECT rewind_id, number, sink, relation, rows FROM tidemark.rewind_archive JOIN tidemark.rewind USING (rewind_id)
 WHERE put_back_at IS NULL AND removed_at IS NULL AND applied_at < clock_timestamp() - %(keep)s
 ORDER BY rewind_id, number;

-- name: remove
-- Marks an archive as removed. Locks its row. Returns no row if an undo has put it back meanwhile.
UPDATE tidemark.rewind_archive SET removed_at = clock_timestamp()
 WHERE rewind_id = %(rewind_id)s AND number = %(number)s AND put_back_at IS NULL AND removed_at IS NULL RETURNING 1;

-- name: forget_deletions
-- Removes deletions that rewinds parked longer ago than `keep`. Locks them.
DELETE FROM tidemark.deletion USING tidemark.rewind WHERE parked_by = rewind_id AND applied_at < clock_timestamp() - %(keep)s;

-- name: forget_deleted_rows
-- Removes the copies of rows that were deleted longer ago than `keep`. A rewind no longer restores these rows. Locks their deletions.
UPDATE tidemark.deletion SET kept = NULL WHERE kept IS NOT NULL AND deleted_at < clock_timestamp() - %(keep)s;

-- name: outdated_groups
-- The groups of rewinds that were applied longer ago than `keep`, oldest first, because rows that an undo needs may be kept under later
-- rewinds.
SELECT grp.rewind_id, grp.group_id FROM tidemark.rewind_group grp JOIN tidemark.rewind USING (rewind_id)
 WHERE overwritten_removed_at IS NULL AND applied_at < clock_timestamp() - %(keep)s
 ORDER BY applied_no, grp.group_id;

-- name: forget
-- Marks the overwritten rows as removed. Locks the row, and waits for an undo that puts them back.
UPDATE tidemark.rewind_group SET overwritten_removed_at = clock_timestamp()
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND overwritten_removed_at IS NULL RETURNING 1;

-- name: drop_floors
-- Stops keeping overwritten rows, unless a later rewind needs them. Waits for commits in flight below these floors.
DELETE FROM tidemark.undo_floor WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s;

-- name: remove_rows
-- Removes the overwritten rows. Locks them; nothing else uses them.
DELETE FROM tidemark.rewound_row WHERE group_id = %(group_id)s AND rewind_id = %(rewind_id)s;
