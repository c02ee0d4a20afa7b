// Tidemark's terms, as in its documentation.

import { Box, Facts, Title, coded, h } from "./base.js";

const TERMS = [
  ["Archive", "The rows that a rewind took out of a sink, stored in tables of the schema `tidemark_archive` until `tidemark maintain` drops them."],
  ["Attempt", "One try of one Airflow task, or one run from the command line. A row of `tidemark.attempt`."],
  ["Audit log", "The events in `tidemark.audit_event`: who did what."],
  ["Batch", "The slices of one Spark job. A row of `tidemark.batch` describes one slice of it."],
  ["Claim", "The update that takes a partition: it raises the epoch and returns the position."],
  ["Conservation check", "Compares the ledger with the sink and the failed records: every record must be accounted for."],
  ["Disposition", "What happens to a record: `load`, `delete`, `skip`, `retry` or `fail`."],
  ["Drain", "A retry run: a bounded run that tries the due records of a group's retry topics."],
  ["Driver", "The process that plans a run and talks to Spark, `spark_jobs/consume.py`."],
  ["Epoch", "A partition's fencing token, `partition_offset.owner_epoch`. A commit must present the epoch of its claim."],
  ["Failed record", "A record that was not loaded, stored in `tidemark.failed_record` with key, value, headers and error."],
  ["Fenced", "A fenced writer's epoch is no longer the row's. The writer stores nothing."],
  ["Form", "How a transform is written: as a function of one record, of an Arrow `RecordBatch`, or of a Spark `DataFrame`."],
  ["Format", "The encoding of keys and values: `bytes`, `string`, `json`, `json_schema`, `avro` or `protobuf`. Tidemark decodes them first."],
  ["Generation", "A number from one sequence of the database, never reused. A claim with a newer generation wins."],
  ["Health", "One word for a consumer's state, with its reason and remedy."],
  ["Held record", "A record that waits because an earlier record of its key waits for a retry (`order: key`)."],
  ["Keeper", "The resident process that forks the drivers of Airflow's tasks and keeps a Spark application for small runs."],
  ["Ladder", "A consumer's retry delays, in order."],
  ["Ledger", "The table `tidemark.batch`: one row per committed slice, with the number of records of each outcome."],
  ["Lineage", "The four columns of a sink row that identify its source record."],
  ["Lost range", "A range of offsets that will not be read, or only by a backfill. A row of `tidemark.lost_range`."],
  ["Mirror", "A copy of a group's positions in Kafka, for Kafka's own tools. Never read back."],
  ["Position", "The next offset to read, `partition_offset.next_offset`."],
  ["Profile", "What a database role may do in Tidemark's schemas: `reader`, `runner`, `stager`, `operator`, `rewinder`."],
  ["Redrive", "Sending failed records through their retries again."],
  ["Relay", "Publishes records that were handed off to the retry topics (the outbox pattern)."],
  ["Rewind", "Any deliberate move of a group's positions, back or forward."],
  ["Run", "The work of one attempt. It is bounded by end offsets, or continuous and bounded by time."],
  ["Sink", "The user's table into which a consumer loads rows."],
  ["Slice", "The part of one partition that one task reads and one transaction commits."],
  ["Staged batch", "A batch whose rows are first copied into an unlogged table, then committed as a whole by the driver."],
  ["Tier", "The retry topic that a record is in or goes to: a delay, `now`, `failed`, or `held`."],
  ["Unaccounted", "Offsets that left neither a row nor a failed record: compaction gaps, transaction markers, filtered rows."],
  ["Validated offset", "The offset up to which validation has passed without a gap. The view `<table>_validated` ends there."],
];

export const Terms = () => h(Box, { maxW: "64rem" }, h(Title, { text: "Terms" }), h(Facts, { rows: TERMS.map(([term, text]) => [term, coded(text)]) }));
