-- Statements of the group coordinator. Lock order: group, members, partitions by (topic, partition). A transaction that locks the group's
-- row may change all of its members' rows. One that shares it may change its own member's. One that does neither may change only the
-- seen_at of its own member. Both lock nothing after that.

-- name: beat
-- Keeps a member's session alive, and answers requests that do not change the group: a Heartbeat, polls of a JoinGroup ('joined') and of a
-- parked SyncGroup ('synced'), and, where the group's row is shared, a SyncGroup, or the JoinGroup of a member in a join phase. Locks the
-- member's row, even if it no longer matches after a wait for the lock. No row returned: something is due, or the request needs another
-- response; nothing was changed.
-- A JoinGroup does not look at the other members: the poll that follows does. Requests that only move seen_at do not wait for the disk or
-- a standby: if they are lost, the server has restarted, and all sessions start again.
WITH grp AS (
    SELECT group_id, state, generation, protocol, leader, initial_until, unsynced,
           set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true) || set_config('lock_timeout', %(lock_ms)s, true)
           || set_config('synchronous_commit', CASE WHEN %(request)s IN ('join', 'sync')
                                                    THEN current_setting('synchronous_commit') ELSE 'off' END, true) AS limits,
           server_start IS DISTINCT FROM pg_postmaster_start_time()
           OR coalesce(least(deadline, initial_until) <= clock_timestamp(), false) OR expired
           OR (state = 'PreparingRebalance' AND initial_until IS NULL AND all_joined)
           OR (state = 'Stable' AND deadline IS NOT NULL AND unsynced = 0) AS due
      FROM tidemark.consumer_group
     CROSS JOIN LATERAL (
           SELECT coalesce(bool_or(seen_at + session_timeout_ms * interval '1 ms' <= clock_timestamp()), false) AS expired,
                  coalesce(bool_and(joining), false) AS all_joined, count(*) FILTER (WHERE NOT synced AND NOT pending) AS unsynced
             FROM tidemark.group_member member WHERE member.group_id = consumer_group.group_id AND %(request)s <> 'join') AS members
     WHERE name = %(group)s
), beat AS (
    UPDATE tidemark.group_member member
       SET seen_at = clock_timestamp(), joining = joining OR %(request)s = 'join',
           synced = CASE %(request)s WHEN 'sync' THEN state <> 'PreparingRebalance' WHEN 'join' THEN false ELSE synced END,
           client_id = coalesce(%(client_id)s, client_id), session_timeout_ms = coalesce(%(session_timeout_ms)s, session_timeout_ms),
           rebalance_timeout_ms = coalesce(%(rebalance_timeout_ms)s, rebalance_timeout_ms),
           expected_members = CASE %(request)s WHEN 'join' THEN %(expected_members)s ELSE expected_members END,
           protocols = coalesce(%(protocols)s, protocols)
      FROM grp
     WHERE member.group_id = grp.group_id AND member_id = %(member_id)s AND NOT due AND NOT pending
       AND seen_at + session_timeout_ms * interval '1 ms' > clock_timestamp()
       AND (%(instance_id)s::text IS NULL OR instance_id = %(instance_id)s)
       AND CASE %(request)s
           WHEN 'join' THEN state = 'PreparingRebalance' AND initial_until IS NULL
                            AND (SELECT jsonb_agg(offer -> 0) FROM jsonb_array_elements(protocols) AS offer) = %(offered)s
           WHEN 'joined' THEN state = 'PreparingRebalance' OR (state IN ('CompletingRebalance', 'Stable') AND member_id <> leader)
           WHEN 'synced' THEN synced AND state IN ('CompletingRebalance', 'Stable') AND generation = %(generation)s
           WHEN 'sync' THEN generation = %(generation)s AND (%(protocol)s::text IS NULL OR protocol = %(protocol)s)
                            AND (state = 'PreparingRebalance' OR (member_id <> leader
                                 AND (state = 'CompletingRebalance' OR (state = 'Stable' AND (synced OR unsynced > 1)))))
           ELSE generation = %(generation)s END
    RETURNING assignment, joining
)
SELECT state, generation, protocol, leader, assignment, joining FROM grp CROSS JOIN beat WHERE limits IS NOT NULL;

-- name: share_group
-- Keeps the group's state unchanged until this transaction ends, and limits it as `lock_group` does. Members that share it do not wait for
-- each other. No row returned: the group does not exist.
SELECT set_config('lock_timeout', %(lock_ms)s, true), set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true)
  FROM tidemark.consumer_group WHERE name = %(group)s FOR SHARE;

-- name: lock_group
-- Locks the group's row and reads it, with its deadlines evaluated. First limits how long this transaction may wait for a lock, and how
-- long it may hold one while its client is idle. Does not block foreign keys to the row: attempts can start during a rebalance.
-- No row returned: the group does not exist.
SELECT group_id, state, generation, protocol, leader, rebalance_reason,
       deadline IS NOT NULL AS deadline_set, coalesce(deadline <= clock_timestamp(), false) AS deadline_passed,
       initial_until IS NOT NULL AS initial_set, coalesce(initial_until <= clock_timestamp(), false) AS initial_passed,
       server_start IS DISTINCT FROM pg_postmaster_start_time() AS restarted,
       set_config('lock_timeout', %(lock_ms)s, true), set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true)
  FROM tidemark.consumer_group WHERE name = %(group)s FOR NO KEY UPDATE;

-- name: read_members
-- The members of a locked group, oldest first. Locks nothing.
SELECT member_no, member_id, instance_id, client_id, pending, joining, synced, session_timeout_ms, rebalance_timeout_ms,
       expected_members, protocols, assignment, seen_at + session_timeout_ms * interval '1 ms' <= clock_timestamp() AS expired
  FROM tidemark.group_member WHERE group_id = %(group_id)s ORDER BY member_no;

-- name: save_group
-- Stores a locked group. Each timer is kept, stopped or started now.
WITH times AS (
    SELECT CASE WHEN NOT %(deadline_changed)s THEN deadline
                ELSE clock_timestamp() + %(deadline_ms)s::integer * interval '1 ms' END AS deadline
      FROM tidemark.consumer_group WHERE group_id = %(group_id)s
)
UPDATE tidemark.consumer_group grp
   SET state = %(state)s, generation = %(generation)s, protocol = %(protocol)s, leader = %(leader)s, deadline = times.deadline,
       initial_until = CASE WHEN NOT %(initial_changed)s THEN initial_until
                            WHEN %(initial_ms)s::integer IS NOT NULL
                            THEN least(clock_timestamp() + %(initial_ms)s::integer * interval '1 ms', times.deadline) END,
       state_since = CASE WHEN %(moved)s THEN clock_timestamp() ELSE state_since END, rebalance_reason = %(reason)s,
       server_start = pg_postmaster_start_time()
  FROM times WHERE grp.group_id = %(group_id)s;

-- name: remove_members
-- Locks their rows, in order of arrival.
DELETE FROM tidemark.group_member WHERE member_no = ANY (%(numbers)s);

-- name: name_removed
-- Names the members whose removal in this transaction is an event of the audit log (`sql/0009_audit.sql`).
SELECT set_config('tidemark.removed_members', %(members)s, true);

-- name: add_members
INSERT INTO tidemark.group_member (group_id, member_id, instance_id, client_id, pending, joining, synced, session_timeout_ms,
                                   rebalance_timeout_ms, expected_members, protocols, assignment)
SELECT %(group_id)s, member_id, instance_id, client_id, pending, joining, synced, session_timeout_ms,
       rebalance_timeout_ms, expected_members, protocols, assignment
  FROM jsonb_to_recordset(%(members)s) AS new (
       member_id text, instance_id text, client_id text, pending boolean, joining boolean, synced boolean, session_timeout_ms integer,
       rebalance_timeout_ms integer, expected_members integer, protocols jsonb, assignment jsonb);

-- name: save_members
-- Stores the members that have changed, in one statement. Locks their rows.
UPDATE tidemark.group_member member
   SET member_id = new.member_id, client_id = new.client_id, pending = new.pending, joining = new.joining, synced = new.synced,
       session_timeout_ms = new.session_timeout_ms, rebalance_timeout_ms = new.rebalance_timeout_ms,
       expected_members = new.expected_members, protocols = new.protocols, assignment = new.assignment,
       seen_at = CASE WHEN new.heard THEN clock_timestamp() ELSE seen_at END
  FROM jsonb_to_recordset(%(members)s) AS new (
       member_no bigint, member_id text, client_id text, pending boolean, joining boolean, synced boolean, session_timeout_ms integer,
       rebalance_timeout_ms integer, expected_members integer, protocols jsonb, assignment jsonb, heard boolean)
 WHERE member.member_no = new.member_no;

-- name: describe
-- A group and its members as they are stored, one row per member; one row for a group without members. Locks nothing.
SELECT state, state_since, rebalance_reason, generation, protocol, leader, member_id, instance_id, client_id, pending, protocols, assignment,
       joined_at, seen_at, coalesce(seen_at + session_timeout_ms * interval '1 ms' <= clock_timestamp(), false) AS overdue
  FROM tidemark.consumer_group LEFT JOIN tidemark.group_member USING (group_id)
 WHERE name = %(group)s ORDER BY member_no;

-- name: list_groups
-- Groups in any of these states (default: any but Dead), by name. Locks nothing.
SELECT name, state, generation, (SELECT count(*) FROM tidemark.group_member WHERE group_id = grp.group_id AND NOT pending) AS members
  FROM tidemark.consumer_group grp
 WHERE CASE WHEN cardinality(%(states)s::text[]) = 0 THEN state <> 'Dead' ELSE state = ANY (%(states)s) END
 ORDER BY name;

-- name: lock_positions
-- Locks the positions of a locked group, in order. May wait for a commit in flight.
SELECT topic_id, topic.name AS topic, partition
  FROM tidemark.partition_offset JOIN tidemark.topic USING (topic_id)
 WHERE group_id = %(group_id)s ORDER BY topic_id, partition FOR UPDATE OF partition_offset;

-- name: fence_positions
-- Takes every partition of a locked group and of its backfills away from its owner, who cannot claim it again. Waits for commits in flight.
UPDATE tidemark.partition_offset SET owner = NULL, owner_epoch = owner_epoch + 1, generation = nextval('tidemark.generation')
 WHERE group_id IN (SELECT group_id FROM tidemark.consumer_group WHERE group_id = %(group_id)s OR side_of = %(group_id)s);

-- name: delete_group
-- Frees the name of a deleted group. Its row and its ledger stay as history.
UPDATE tidemark.consumer_group SET name = name || ' (deleted, group ' || group_id || ')' WHERE group_id = %(group_id)s;

-- name: count_batches
-- Locks nothing.
SELECT count(*) FROM tidemark.batch WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: delete_position
DELETE FROM tidemark.partition_offset WHERE group_id = %(group_id)s AND topic_id = %(topic_id)s AND partition = %(partition)s;

-- name: require_member
-- Keeps a member in the group until this transaction ends. Locks its row, but does not block its heartbeats. No row returned: the group no
-- longer has this member.
SELECT FROM tidemark.group_member WHERE group_id = %(group_id)s AND member_id = %(member_id)s FOR KEY SHARE;
