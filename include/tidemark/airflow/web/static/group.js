// One group.

import { A, Ago, Banners, Box, Button, Code, Due, Empty, Facts, Flex, LinkButton, Loaded, Muted, Notice, Query, RunLink, Section, Sized, State, Text,
  Title, api, counted, duration, h, moment, number, rate, rewindPath, taskPath, to, useData, useState } from "./base.js";
import { LagChart, Timeline } from "./chart.js";
import { Rows } from "./table.js";

export const Group = ({ consumer }) => {
  const state = useData(api("groups", consumer));
  return h(Loaded, { state }, (data) => h(View, { consumer, data }));
};

function View({ consumer, data }) {
  const { summary } = data;
  const newest = data.attempts[0];
  const failed = newest?.state === "FAILED" ? newest : null;
  return h(Box, null,
    h(Title, { text: consumer }, h(State, { value: summary.health }), data.forms.rewind && h(LinkButton, { to: rewindPath(consumer) }, "Rewind …")),
    summary.description && h(Text, { color: "fg.muted" }, summary.description),
    h(Banners, { banners: data.banners }),
    data.problems.length > 0 && h(Notice, { tone: "error", role: "alert", title: `${data.file} has ${counted(data.problems.length, "problem")}` },
      data.problems.map((problem) => h(Text, { key: problem.at }, h(Code, null, problem.at), ` ${problem.message}: ${problem.fix}`))),
    failed && h(Notice, { tone: "error", role: "alert", title: `The last run failed: ${failed.error}` },
      h(Text, null, failed.error_text), h(Flex, { gap: 4, mt: 1, wrap: "wrap" },
        failed.task_id && h(A, { to: taskPath(failed) }, "Task log"), data.forms.rewind && h(A, { to: rewindPath(consumer) }, "Rewind"))),
    !failed && !["ok", "idle", "running"].includes(summary.health) && h(Notice, { tone: "info", title: summary.why }, summary.fix && h(Text, null, summary.fix), causes(consumer, summary)),
    h(Section, { title: "Now" }, h(Facts, { rows: facts(consumer, data) })),
    data.history.length > 1 && h(Section, { title: "Lag", aside: h(Muted, null, "records of the last day; rewinds in purple, rebalances in grey, failed runs in red") },
      h(Sized, null, (width) => h(LagChart, { consumer: data.forms.rewind && consumer, width, history: data.history, rewinds: data.rewinds, rebalances: data.rebalances, failed: data.attempts.filter((attempt) => attempt.state === "FAILED") }))),
    data.history.length === 1 && h(Section, { title: "Lag" }, h(Muted, null, "The chart begins with the second sample.")),
    h(Section, { title: "Partitions", aside: h(Muted, null, counted(data.partitions_in_all ?? 0, "partition")) },
      data.partitions.length ? h(Rows, { label: "Partitions", rows: data.partitions, id: (row) => `${row.topic}/${row.partition}/${row.epoch}`, columns: PARTITIONS })
        : h(Empty, { title: "No partition has been claimed yet" }, "The first run claims them. Start the consumer's DAG.")),
    data.lost.length > 0 && h(Section, { title: "Lost ranges", aside: h(Muted, null, "offsets that were never read") },
      h(Rows, { label: "Lost ranges", rows: data.lost, id: (row) => `${row.topic}/${row.partition}@${row.start_offset}`, columns: LOST }), h(Query, { text: data.queries.lost })),
    h(Section, { title: "Batches", aside: h(Muted, null, "the last runs; a colour for each attempt, red for a failed one; dashed where an attempt failed (red) or was fenced (purple)") },
      h(Sized, null, (width) => h(Timeline, { consumer: data.forms.rewind && consumer, width, batches: data.batches, attempts: data.attempts })), h(Query, { text: data.queries.batches })),
    h(Section, { title: "Attempts" }, data.attempts.length
      ? h(Rows, { label: "Attempts", rows: data.attempts, id: (row) => row.attempt_id, columns: attempts(data.forms.rewind && consumer), details: (row) => row.error_text && h(Muted, { overflowWrap: "anywhere" }, row.error_text) })
      : h(Empty, { title: "No run yet" }, "Each run of the DAG appears here."), h(Query, { text: data.queries.attempts })),
    h(Members, { data }),
    h(Rebalances, { generations: data.rebalances, query: data.queries.rebalances }),
    h(Section, { title: "Effective spec", aside: h(Muted, null, `${data.file}, with every default filled in`) },
      h(Box, { as: "details" }, h(Box, { as: "summary", cursor: "pointer", color: "fg.info" }, "Show"),
        h(Box, { as: "pre", tabIndex: 0, fontSize: "xs", overflowX: "auto", p: 3, bg: "bg.muted", borderRadius: "md", mt: 2 }, data.spec))));
}

const causes = (consumer, row) => h(Flex, { gap: 4, wrap: "wrap" },
  row.failed > 0 && h(A, { to: `${to("retries", consumer)}?state=FAILED` }, "Failed records"),
  row.waiting > 0 && h(A, { to: to("retries", consumer) }, "Waiting records"),
  row.blocked_by && h(A, { to: to("validations", consumer, row.blocked_by) }, "Failing rows"),
  row.lag?.replay_records > 0 && h(A, { to: `${to("rewinds")}?consumer=${encodeURIComponent(consumer)}` }, "Rewinds"),
  h(A, { to: `/dags/${row.dag_id}` }, "DAG"));

const transformOf = (consumer, { transform, file }) => transform === null
  ? h(Muted, null, "none, fields become columns")
  : h(Box, null, file ? h(A, { to: to("groups", consumer, "transform") }, transform) : transform, h(Muted, null, ` ${file ?? "an installed module"}`));

const facts = (consumer, { summary: row, lag, unvalidated, flow, source }) => [
  ["Group", row.group], ["Reads", row.topics.join(", ")], ["Loads into", row.table],
  ["Transform", transformOf(consumer, source)],
  row.lag && ["Lag", h(Box, null, `${row.lag.records === null ? "unknown" : counted(row.lag.records, "record")}`,
    row.lag.seconds !== null && `, ${duration(row.lag.seconds)} behind`, h(Muted, { display: "block" }, "Sampled ", h(Ago, { at: row.lag.sampled_at }), "."))],
  lag && lag.records > 0 && ["Caught up", lag.never ? "never: the lag grows" : lag.catch_up_s === null ? "unknown" : `in ${duration(lag.catch_up_s)}`],
  lag && lag.retention_used !== null && ["Retention used", `${Math.round(lag.retention_used * 100)} %`],
  ["Last commit", h(Ago, { at: row.committed_at })],
  ["Records", h(Flex, { gap: 3, wrap: "wrap" }, h(A, { to: `${to("retries", consumer)}?state=WAITING` }, `${number(row.waiting ?? 0)} waiting`),
    h(A, { to: `${to("retries", consumer)}?state=FAILED` }, `${number(row.failed ?? 0)} failed`))],
  ["Not validated yet", unvalidated === null ? "–" : counted(unvalidated, "offset")],
  ["Last validation", row.validation_id ? h(A, { to: to("validations", consumer, row.validation_id) }, row.verdict) : "none"],
  ["Next run", row.dag?.is_paused ? h(A, { to: `/dags/${row.dag_id}` }, "The DAG is paused") : h(Box, null, h(Due, { at: row.dag?.next_run }), h(Muted, { display: "block" }, row.schedule))],
  ["DAG", h(Flex, { gap: 3, wrap: "wrap" }, h(A, { to: `/dags/${row.dag_id}` }, row.dag_id), h(A, { to: `/dags/${row.dag_id}/code` }, "code"))],
  ["More", h(Flex, { gap: 3, wrap: "wrap" }, ["rewinds", "audit", "validations"].map((view) =>
    h(A, { key: view, to: `${to(view)}?consumer=${encodeURIComponent(consumer)}` }, view)))],
  ...flow.filter((pause) => pause.paused).map((pause) => [`Paused: ${pause.topic ?? "everything"}${pause.partition === null ? "" : `/${pause.partition}`}`,
    `${pause.reason || "no reason given"}, by ${pause.changed_by}, ${moment(pause.changed_at)}`]),
];

const PARTITIONS = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "Position", end: true, cell: (row) => number(row.position) },
  { name: "End", end: true, cell: (row) => number(row.lag?.log_end) },
  { name: "Lag", end: true, cell: (row) => row.lag ? h(Box, null, number(row.lag.records), row.lag.seconds !== null && h(Muted, { display: "block" }, duration(row.lag.seconds))) : "–" },
  { name: "In / s", end: true, cell: (row) => rate(row.lag?.produced_per_s) },
  { name: "Out / s", end: true, cell: (row) => rate(row.lag?.consumed_per_s) },
  { name: "Validated to", end: true, cell: (row) => number(row.validated) },
  { name: "State", cell: (row) => row.paused ? h(State, { value: "paused" })
    : row.replaying_until !== null ? h(Box, null, h(State, { value: "replaying" }), h(Muted, { display: "block" }, `until ${number(row.replaying_until)}, rewind ${row.rewind_id}`)) : null },
  { name: "Owner", cell: (row) => row.owner ?? h(Muted, null, "nobody") },
  { name: "Instance", cell: (row) => row.instance },
  { name: "Epoch", end: true, cell: (row) => number(row.epoch) },
  { name: "Committed", cell: (row) => h(Ago, { at: row.committed_at }) },
];

const LOST = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "From", end: true, cell: (row) => number(row.start_offset) },
  { name: "To", end: true, cell: (row) => row.end_offset === null ? "unknown" : number(row.end_offset) },
  { name: "Why", cell: (row) => row.reason },
  { name: "Recorded", cell: (row) => h(Ago, { at: row.recorded_at }) },
];

const attempts = (consumer) => [
  { name: "Attempt", cell: (row) => h(Box, null, `${row.attempt_id} `, h(State, { value: row.error_kind === "fenced" ? "FENCED" : row.state }), row.backfill_of && h(Muted, null, ` backfill of rewind ${row.backfill_of}`)) },
  { name: "DAG run", cell: (row) => h(RunLink, { row }) },
  { name: "Task log", cell: (row) => row.task_id ? h(A, { to: taskPath(row) }, `try ${row.try_number}`) : null },
  { name: "Started", cell: (row) => h(Ago, { at: row.started_at }) },
  { name: "Took", end: true, cell: (row) => row.ended_at ? duration((Date.parse(row.ended_at) - Date.parse(row.started_at)) / 1000) : "still running" },
  { name: "Batches", end: true, cell: (row) => number(row.batches) },
  { name: "Loaded", end: true, cell: (row) => h(Box, null, number(row.loaded), row.deleted > 0 && h(Muted, { display: "block" }, counted(row.deleted, "delete"))) },
  { name: "To retry", end: true, cell: (row) => number(row.retried) },
  { name: "Failed", end: true, cell: (row) => number(row.failed) },
  { name: "Error", cell: (row) => row.error },
  ...(consumer ? [{ name: "Rewind", cell: (row) => row.run_id && row.batches > 0
    ? h(A, { to: rewindPath(consumer, "to-batch", `${row.dag_id}/${row.run_id}`), "aria-label": `Rewind to before attempt ${row.attempt_id}` }, "to before it …") : null }] : []),
];

// The group's members, and the static members of the consumer's mapped task, whether they have joined or not.
function Members({ data }) {
  const membership = data.membership;
  const members = membership?.members ?? [];
  if (!data.instances.length && !members.length) {
    return h(Section, { title: "Members" }, h(Muted, null, "This consumer has no members: each run reads all of its partitions. members: 2 or more in its file makes a group."));
  }
  const instances = data.instances.map((instance) => ({ ...instance, member: members.find((member) => member.instance_id === instance.instance) }));
  const others = members.filter((member) => !data.instances.some((instance) => instance.instance === member.instance_id)).map((member) => ({ instance: null, member }));
  return h(Section, { title: "Members", aside: h(Muted, null, membership && `${membership.state}, generation ${membership.generation}${membership.protocol ? `, ${membership.protocol}` : ""}`) },
    h(Rows, { label: "Members", rows: [...instances, ...others], id: (row) => row.instance ?? row.member.member_id, columns: [
      { name: "Instance", cell: (row) => row.instance ?? h(Muted, null, row.member.instance_id ?? row.member.member_id) },
      { name: "Member", cell: ({ member }) => !member ? h(Muted, null, "none: members leave when their run ends")
        : h(Box, null, member.client_id, member.member_id === membership.leader && h(Muted, null, " leader"), member.overdue && h(State, { value: "overdue" })) },
      { name: "Has", cell: ({ member }) => held(member) },
      { name: "Read last", cell: (row) => row.read },
      { name: "Joined", cell: ({ member }) => member && h(Ago, { at: member.joined_at }) },
      { name: "Seen", cell: ({ member }) => member && h(Ago, { at: member.seen_at }) },
    ] }));
}

const held = (member) => Object.entries(member?.assignment?.partitions ?? {}).map(([topic, parts]) => `${topic}: ${parts.join(", ")}`).join("; ");

const REBALANCES = 12;

// Generations, newest first, and the moves of each between members.
function Rebalances({ generations, query }) {
  const [all, setAll] = useState(false);
  if (!generations.length) return null;
  return h(Section, { title: "Rebalances", aside: h(Muted, null, "generations, newest first") },
    h(Rows, { label: "Rebalances", rows: all ? generations : generations.slice(0, REBALANCES), id: (row) => row.generation, columns: [
      { name: "Generation", cell: (row) => row.generation },
      { name: "When", cell: (row) => h(Ago, { at: row.at }) },
      { name: "Why", cell: (row) => h(Box, { maxW: "22rem" }, row.reason) },
      { name: "Members", end: true, cell: (row) => number(row.members) },
      { name: "Moved", cell: (row) => row.moves === null ? h(Muted, null, "unknown: the generation before is not stored") : row.moves.length === 0 ? h(Muted, null, "nothing")
        : row.moves.map((move) => h(Box, { key: `${move.from}>${move.to}`, overflowWrap: "anywhere" }, move.what, h(Muted, null, ` ${move.from ?? "nobody"} → ${move.to ?? "nobody"}`))) },
    ] }),
    generations.length > REBALANCES && h(Button, { mt: 2, size: "sm", variant: "outline", onClick: () => setAll(!all) }, all ? "Show fewer" : `Show all ${generations.length}`), h(Query, { text: query }));
}
