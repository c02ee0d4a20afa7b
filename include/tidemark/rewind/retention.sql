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

-- name: outdated_groups
-- The groups of such rewinds, oldest first: rows that the undo of one needs may be kept under later ones.
SELECT grp.rewind_id, grp.group_id FROM tidemark.rewind_group grp JOIN tidemark.rewind USING (rewind_id)
 WHERE overwritten_removed_at IS NULL AND applied_at < clock_timestamp() - %(keep)s
 ORDER BY applied_no, grp.group_id;

-- name: forget
-- Notes that the rows are gone that were written over since. Locks the row, and waits for an undo that puts them back.
UPDATE tidemark.rewind_group SET overwritten_removed_at = clock_timestamp()
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND overwritten_removed_at IS NULL RETURNING 1;

-- name: drop_floors
-- Nothing has to be kept any more where no later rewind came. Waits for commits that are under way below these floors.
DELETE FROM tidemark.undo_floor WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s;

-- name: remove_rows
-- Locks the rows, which nobody else wants.
DELETE FROM tidemark.rewound_row WHERE group_id = %(group_id)s AND rewind_id = %(rewind_id)s;
