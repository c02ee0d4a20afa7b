-- Statements on stored verdicts. They lock nothing.

-- name: newest
-- The newest validations of a group before one (null: the newest of all).
SELECT validation_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at,
       (SELECT count(*) FROM tidemark.validation_result result
         WHERE result.validation_id = validation.validation_id AND NOT success) AS failing
  FROM tidemark.validation JOIN tidemark.consumer_group USING (group_id)
 WHERE name = %(group)s AND (%(before)s::bigint IS NULL OR validation_id < %(before)s)
 ORDER BY validation_id DESC LIMIT %(limit)s;

-- name: one
SELECT validation_id, dag_id, run_id, suite, verdict, sink_rows, seconds, validated_at
  FROM tidemark.validation JOIN tidemark.consumer_group USING (group_id)
 WHERE name = %(group)s AND validation_id = %(validation_id)s;

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
