-- Statements of the page's first view. They lock nothing.

-- name: trends
-- The lag of each group in steps of five minutes, oldest first.
SELECT grp.name AS "group", array_agg(steps.records ORDER BY at) AS records
  FROM (SELECT group_id, at, sum(lag)::bigint AS records FROM tidemark.lag_history
         WHERE step_s = 300 AND at >= (SELECT clock_timestamp()) - %(period)s GROUP BY group_id, at) steps
  JOIN tidemark.consumer_group grp USING (group_id)
 WHERE grp.name = ANY (%(groups)s) GROUP BY grp.name;
