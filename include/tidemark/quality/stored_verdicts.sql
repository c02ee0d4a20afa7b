-- Statements on stored verdicts. They lock nothing.

-- name: newest
-- The newest validations of these groups with this verdict (null: any): a few per group, at most %(most)s in all.
SELECT newest.*,
       (SELECT (detail ->> 'deleted')::bigint FROM tidemark.validation_result result
         WHERE result.validation_id = newest.validation_id AND number = 0) AS deleted,
       (SELECT count(*) FROM tidemark.validation_result result WHERE result.validation_id = newest.validation_id AND NOT success) AS failing
  FROM (SELECT grp.name AS "group", each.*
          FROM tidemark.consumer_group grp
         CROSS JOIN LATERAL (SELECT validation_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at
                               FROM tidemark.validation
                              WHERE group_id = grp.group_id AND (%(verdict)s::text IS NULL OR verdict = %(verdict)s)
                              ORDER BY validation_id DESC LIMIT %(of_each)s) each
         WHERE grp.name = ANY (%(groups)s) ORDER BY validation_id DESC LIMIT %(most)s) newest
 ORDER BY validation_id DESC;

-- name: validation
SELECT validation_id, dag_id, run_id, suite, verdict, sink_rows, (detail ->> 'deleted')::bigint AS deleted, seconds, validated_at
  FROM tidemark.validation JOIN tidemark.consumer_group USING (group_id)
  JOIN tidemark.validation_result conservation USING (validation_id)
 WHERE name = %(group)s AND validation_id = %(validation_id)s AND conservation.number = 0;

-- name: results
SELECT number, expectation, severity, success, detail
  FROM tidemark.validation_result WHERE validation_id = %(validation_id)s ORDER BY number;

-- name: failing_rows
-- The first failing rows of each expectation of a validation.
SELECT number, topic.name AS topic, kafka_partition AS partition, kafka_offset AS offset, kafka_seq AS seq
  FROM (SELECT *, row_number() OVER (PARTITION BY number ORDER BY kafka_topic_id, kafka_partition, kafka_offset, kafka_seq) AS nth
          FROM tidemark.validation_row WHERE validation_id = %(validation_id)s) ranked
  JOIN tidemark.topic ON topic.topic_id = kafka_topic_id
 WHERE nth <= %(limit)s ORDER BY number, nth;
