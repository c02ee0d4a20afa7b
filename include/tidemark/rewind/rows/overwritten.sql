-- Statements that put back rows overwritten below the point of a rewind. They need the positions' locks, so that nothing writes these rows
-- meanwhile.

-- name: since
-- The kept rows of a group's partitions that were overwritten since the undone rewind. Part of the statements below.
FROM tidemark.rewind_partition place, tidemark.rewind undone, tidemark.rewind keeper
WHERE place.rewind_id = %(rewind_id)s AND place.group_id = %(group_id)s AND NOT place.hold AND undone.rewind_id = %(undo_of)s
  AND kept.group_id = place.group_id AND kept.topic_id = place.topic_id AND kept.partition = place.partition AND kept.parked_by IS NULL
  AND keeper.rewind_id = kept.rewind_id AND keeper.applied_no >= undone.applied_no

-- name: park
-- Parks kept rows at or after the point, like the sink rows that the undo takes out: an undo of the undo needs them.
UPDATE tidemark.rewound_row kept SET parked_by = %(rewind_id)s
{since} AND EXISTS (SELECT FROM tidemark.rewind_partition own
                     WHERE own.rewind_id = place.rewind_id AND own.group_id = kept.group_id AND NOT own.hold
                       AND own.topic_id = kept.kafka_topic_id AND own.partition = kept.kafka_partition
                       AND kept.kafka_offset >= own.superseded_from);

-- name: take_over
-- Moves the remaining kept rows under the undo.
UPDATE tidemark.rewound_row kept SET rewind_id = %(rewind_id)s
{since};

-- name: other_sinks
-- Other tables with rows kept under the undo. Locks nothing.
SELECT DISTINCT kept.sink FROM tidemark.rewound_row kept
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND sink <> ALL (%(sinks)s);

-- name: shapes
-- The column lists of the rows kept under the undo; several if the table was changed meanwhile. Locks nothing.
SELECT DISTINCT ARRAY(SELECT name FROM jsonb_object_keys(kept) name ORDER BY name COLLATE "C")
  FROM tidemark.rewound_row
 WHERE rewind_id = %(rewind_id)s AND group_id = %(group_id)s AND sink = %(sink)s AND parked_by IS NULL;

-- name: return
-- Puts the last row of each key into the sink, unless the sink has a later one of the same partition, or a deletion follows. Rows of keys
-- in several partitions are ordered by when they were overwritten. Returns the numbers of inserted rows, and of rows that arrived
-- unchanged.
WITH candidate AS (
    SELECT newer.*, bool_or(newer.elsewhere) OVER (PARTITION BY {key}) AS mixed
      FROM tidemark.rewound_row newer
     WHERE rewind_id = {rewind_id} AND group_id = {group_id} AND sink = {sink_name} AND parked_by IS NULL
), latest AS MATERIALIZED (
    SELECT DISTINCT ON ({key}) newer.* FROM candidate newer
     ORDER BY {key}, CASE WHEN mixed THEN number END DESC, kafka_topic_id DESC, kafka_offset DESC, kafka_seq DESC
), winner AS MATERIALIZED (
    SELECT newer.* FROM latest newer
     WHERE ARRAY(SELECT name FROM jsonb_object_keys(newer.kept) name ORDER BY name COLLATE "C") = {shape}::text[]
       AND NOT EXISTS (SELECT FROM {sink} present WHERE {same_key} AND {same_partition}
                          AND (present.kafka_topic_id, present.kafka_offset) >= (newer.kafka_topic_id, newer.kafka_offset))
       AND NOT ({stays_out})
), gone AS (
    DELETE FROM tidemark.rewound_row USING winner WHERE rewound_row.number = winner.number
), back AS (
    INSERT INTO {sink} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM winner newer
    RETURNING {came}
)
SELECT (SELECT count(*) FROM winner),
       (SELECT count(*) FROM (SELECT * FROM back INTERSECT ALL SELECT {was} FROM winner newer) alike); -- a join might become a nested loop

-- name: give_way
-- Moves rows of the moved partitions out of the sink if an archive restores their keys, and keeps them under the undo. They lie below the
-- point of the rewind; later rows were taken out before.
WITH life AS (
    SELECT former.topic_id, part.partition, part.topic_id AS now_id
      FROM tidemark.rewind_partition part JOIN tidemark.topic now USING (topic_id) JOIN tidemark.topic former USING (name)
     WHERE part.rewind_id = {rewind_id} AND part.group_id = {group_id} AND NOT part.hold
), gone AS (
    DELETE FROM {sink} present USING {archive} newer, life
     WHERE {same_key} AND present.kafka_topic_id = life.topic_id AND present.kafka_partition = life.partition
    RETURNING life.now_id, present.kafka_topic_id, present.kafka_partition, present.kafka_offset, present.kafka_seq,
              jsonb_object({names}, {values}) AS kept
)
INSERT INTO tidemark.rewound_row (rewind_id, group_id, topic_id, partition, sink, elsewhere,
                                  kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept)
SELECT {rewind_id}, {group_id}, now_id, kafka_partition, {sink_name}, false,
       kafka_topic_id, kafka_partition, kafka_offset, kafka_seq, kept
  FROM gone;

-- name: in_the_way
-- Counts the rows that should have given way and are still in the sink. Locks nothing.
SELECT count(DISTINCT present.ctid)
  FROM {sink} present, {archive} newer, tidemark.rewind_partition part
  JOIN tidemark.topic now USING (topic_id) JOIN tidemark.topic former USING (name)
 WHERE {same_key} AND part.rewind_id = {rewind_id} AND part.group_id = {group_id} AND NOT part.hold
   AND present.kafka_topic_id = former.topic_id AND present.kafka_partition = part.partition;

-- name: unpark
-- For the undo of an undo: unparks the rows that the first undo had parked.
UPDATE tidemark.rewound_row SET parked_by = NULL, rewind_id = %(rewind_id)s WHERE parked_by = %(undo_of)s AND group_id = %(group_id)s;

-- name: any_since
SELECT EXISTS (SELECT FROM tidemark.rewound_row kept WHERE EXISTS (SELECT {since}));

-- name: removed
-- The upsert sinks whose rows overwritten since a rewind were removed. Locks nothing.
SELECT sink FROM tidemark.rewind_group
 WHERE rewind_id = %(rewind_id)s AND overwritten_removed_at IS NOT NULL AND basis -> 'spec' ->> 'mode' = 'upsert' ORDER BY group_id;

-- name: note_floors
-- Stores the floors from before the rewind. Locks its own rows.
UPDATE tidemark.rewind_partition part SET floor_before = found.floor
  FROM tidemark.undo_floor found JOIN tidemark.rewind_group grp USING (group_id, sink)
 WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold AND grp.rewind_id = part.rewind_id AND grp.group_id = part.group_id
   AND found.group_id = part.group_id AND found.topic_id = part.topic_id AND found.partition = part.partition;

-- name: set_floors
-- Keeps every row below the point of the rewind from now on. After an undo, rewinds from before the undone one can be undone too, so
-- the greatest floor counts. Locks the floors.
INSERT INTO tidemark.undo_floor (group_id, topic_id, partition, sink, sinks, rewind_id, floor)
SELECT part.group_id, part.topic_id, part.partition, grp.sink, grp.sinks, part.rewind_id, greatest(part.superseded_from, undone.floor_before)
  FROM tidemark.rewind_partition part
  JOIN tidemark.rewind_group grp USING (rewind_id, group_id)
  LEFT JOIN tidemark.rewind_partition undone ON undone.rewind_id = %(undo_of)s AND undone.group_id = part.group_id
       AND undone.topic_id = part.topic_id AND undone.partition = part.partition
 WHERE part.rewind_id = %(rewind_id)s AND NOT part.hold
 ORDER BY part.group_id, part.topic_id, part.partition
ON CONFLICT (group_id, topic_id, partition) DO UPDATE
   SET sink = excluded.sink, sinks = excluded.sinks, rewind_id = excluded.rewind_id, floor = excluded.floor;
