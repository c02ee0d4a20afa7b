-- Statements on an operator's settings for a group's reading.

-- name: read
-- The settings of a group. A side group has the settings of the group that it belongs to. While a replay beside holds a group
-- (`tidemark.rewind.beside`), the group is paused.
SELECT topic, partition, paused, priority, max_ahead FROM tidemark.flow
 WHERE group_id = (SELECT coalesce(side_of, group_id) FROM tidemark.consumer_group WHERE group_id = %(group_id)s)
 UNION ALL
SELECT NULL, NULL, true, 0, NULL FROM tidemark.rewind JOIN tidemark.rewind_group USING (rewind_id)
 WHERE state = 'BESIDE' AND hold_until > clock_timestamp() AND rewind_group.group_id = %(group_id)s;

-- name: pause
-- Locks the row if it exists.
INSERT INTO tidemark.flow (group_id, topic, partition, paused, reason)
VALUES (%(group_id)s, %(topic)s, %(partition)s, true, %(reason)s)
ON CONFLICT (group_id, topic, partition)
DO UPDATE SET paused = true, reason = excluded.reason, changed_by = excluded.changed_by, changed_at = excluded.changed_at;

-- name: resume
-- Locks the rows of the target and of everything below it.
UPDATE tidemark.flow SET paused = false, reason = '', changed_by = current_user, changed_at = clock_timestamp()
 WHERE group_id = %(group_id)s AND paused AND (%(topic)s::text IS NULL OR topic = %(topic)s)
   AND (%(partition)s::integer IS NULL OR partition = %(partition)s)
RETURNING topic, partition;

-- name: prioritize
INSERT INTO tidemark.flow (group_id, topic, priority) VALUES (%(group_id)s, %(topic)s, %(priority)s)
ON CONFLICT (group_id, topic, partition)
DO UPDATE SET priority = excluded.priority, changed_by = excluded.changed_by, changed_at = excluded.changed_at;

-- name: limit_ahead
INSERT INTO tidemark.flow (group_id, max_ahead) VALUES (%(group_id)s, %(max_ahead)s)
ON CONFLICT (group_id, topic, partition)
DO UPDATE SET max_ahead = excluded.max_ahead, changed_by = excluded.changed_by, changed_at = excluded.changed_at;
