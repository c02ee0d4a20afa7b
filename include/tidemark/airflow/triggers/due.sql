-- The query of the trigger that watches for due retries. Takes no locks.

-- name: due
-- For each of these groups that has waiting records: when its first and last due records became due, and in how many seconds the next one
-- is due. Groups that are paused wait for `resume`, after which their due records fire the trigger. Costs a few index probes per group. Uses the
-- database clock.
SELECT name, first.due_at AS first, last.due_at AS last, extract(epoch FROM next.due_at - now)::double precision AS next_s
  FROM tidemark.consumer_group grp
 CROSS JOIN (SELECT clock_timestamp() AS now) clock
  LEFT JOIN LATERAL (SELECT due_at FROM tidemark.failed_record WHERE group_id = grp.group_id AND state = 'WAITING' AND due_at <= now
                      ORDER BY due_at LIMIT 1) first ON true
  LEFT JOIN LATERAL (SELECT due_at FROM tidemark.failed_record WHERE group_id = grp.group_id AND state = 'WAITING' AND due_at <= now
                      ORDER BY due_at DESC LIMIT 1) last ON true
  LEFT JOIN LATERAL (SELECT due_at FROM tidemark.failed_record WHERE group_id = grp.group_id AND state = 'WAITING' AND due_at > now
                      ORDER BY due_at LIMIT 1) next ON true
 WHERE name = ANY (%(groups)s)
   AND NOT EXISTS (SELECT FROM tidemark.flow WHERE flow.group_id = grp.group_id AND flow.paused AND flow.topic IS NULL)
   AND (first.due_at IS NOT NULL OR next.due_at IS NOT NULL);
