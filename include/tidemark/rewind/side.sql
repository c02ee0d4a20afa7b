-- name: lock_group
-- One rewind per group at a time. A transaction-level advisory lock: the group's row stays free, so members can join and leave. With the lock
-- of a side group, a swap and a discard wait for validations of the replay, which share it.
SELECT pg_advisory_xact_lock(%(class)s, %(group_id)s);

-- name: of_attempt
-- The group and the rewind of an attempt that reads for a side group, and whether it reads a replay beside. No row: an ordinary run. Locks
-- nothing.
SELECT grp.name, of_rewind, beside
  FROM tidemark.attempt JOIN tidemark.rewind ON rewind_id = of_rewind JOIN tidemark.consumer_group grp USING (group_id)
 WHERE attempt_id = %(attempt_id)s;
