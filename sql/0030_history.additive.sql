-- Indexes for statements whose cost would otherwise grow with the history: attempts, validations, settled records, rewinds, events.

CREATE INDEX attempt_running ON tidemark.attempt (group_id) WHERE state = 'RUNNING';
CREATE INDEX validation_critical ON tidemark.validation (group_id) WHERE verdict = 'critical';

-- What an attempt has lost, which is looked up at its end.
CREATE INDEX lost_range_attempt ON tidemark.lost_range (attempt_id) WHERE attempt_id IS NOT NULL;

-- Settled records that still have their payloads.
CREATE INDEX failed_record_full ON tidemark.failed_record (failed_record_id)
 WHERE emptied_at IS NULL AND state IN ('LOADED', 'SKIPPED', 'DISCARDED');

CREATE INDEX audit_event_group ON tidemark.audit_event (group_name, event_id);

-- Rewinds that took a partition from a given offset or a later one: those whose replay may not have ended.
DROP INDEX tidemark.rewind_partition_partition;
CREATE INDEX rewind_partition_partition ON tidemark.rewind_partition (group_id, topic_id, partition, old_offset);
CREATE INDEX rewind_group_consumer ON tidemark.rewind_group (consumer, rewind_id);
CREATE INDEX rewind_group_kept ON tidemark.rewind_group (rewind_id) WHERE overwritten_removed_at IS NULL;
CREATE INDEX rewind_archive_kept ON tidemark.rewind_archive (rewind_id) WHERE put_back_at IS NULL AND removed_at IS NULL;
CREATE INDEX rewind_run ON tidemark.rewind (dag_id, run_id) WHERE dag_id IS NOT NULL;
CREATE INDEX redrive_run ON tidemark.redrive (dag_id, run_id) WHERE dag_id IS NOT NULL;
