// One group.

import { A, Ago, Banners, Box, Button, Code, Due, Empty, Facts, Flex, Heading, Loaded, Muted, Notice, RouterLink, RunLink, Section, State, Text, api,
  counted, duration, h, moment, number, taskPath, to, useData } from "./base.js";
import { LagChart, Timeline } from "./chart.js";
import { rewindPath } from "./preview.js";
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
    h(Flex, { gap: 3, align: "center", wrap: "wrap" },
      h(Heading, { as: "h1", size: "xl", overflowWrap: "anywhere" }, consumer), h(State, { value: summary.condition }),
      data.forms.rewind && h(Button, { asChild: true, size: "sm", variant: "outline" }, h(RouterLink, { to: to("groups", consumer, "rewind") }, "Rewind …"))),
    summary.description && h(Text, { color: "fg.muted" }, summary.description),
    h(Banners, { banners: data.banners }),
    data.problems.length > 0 && h(Notice, { tone: "error", role: "alert", title: `${data.file} has ${counted(data.problems.length, "problem")}` },
      data.problems.map((one) => h(Text, { key: one.at }, h(Code, null, one.at), ` ${one.message}: ${one.fix}`))),
    failed && h(Notice, { tone: "error", role: "alert", title: `The last run failed: ${failed.error}` },
      h(Text, null, failed.error_text), h(Flex, { gap: 4, mt: 1, wrap: "wrap" },
        failed.task_id && h(A, { to: taskPath(failed) }, "Task log"), data.forms.rewind && h(A, { to: to("groups", consumer, "rewind") }, "Rewind"))),
    !failed && summary.why && summary.condition !== "ok" && h(Notice, { tone: "info", title: summary.why }, causes(consumer, summary)),
    h(Section, { title: "Now" }, h(Facts, { rows: facts(consumer, data) })),
    data.history.length > 1 && h(Section, { title: "Lag", aside: h(Muted, null, "records of the last day; rewinds in blue, failed runs in red") },
      h(LagChart, { consumer: data.forms.rewind && consumer, history: data.history, rewinds: data.rewinds, failed: data.attempts.filter((one) => one.state === "FAILED") })),
    h(Section, { title: "Partitions", aside: h(Muted, null, counted(data.partitions_in_all ?? 0, "partition")) },
      data.partitions.length ? h(Rows, { label: "Partitions", rows: data.partitions, id: (row) => `${row.topic}/${row.partition}/${row.epoch}`, columns: PARTITIONS })
        : h(Empty, { title: "No partition has been claimed yet" }, "The first run claims them. Start the consumer's DAG.")),
    data.lost.length > 0 && h(Section, { title: "Lost ranges", aside: h(Muted, null, "offsets that nobody has read") },
      h(Rows, { label: "Lost ranges", rows: data.lost, id: (row) => `${row.topic}/${row.partition}@${row.start_offset}`, columns: LOST })),
    h(Section, { title: "Batches", aside: h(Muted, null, "the last runs; a colour for each attempt, red where an attempt failed") },
      h(Timeline, { consumer: data.forms.rewind && consumer, batches: data.batches, attempts: data.attempts })),
    h(Section, { title: "Attempts" }, data.attempts.length
      ? h(Rows, { label: "Attempts", rows: data.attempts, id: (row) => row.attempt_id, columns: attempts(data.forms.rewind && consumer), details: (row) => row.error_text && h(Muted, { overflowWrap: "anywhere" }, row.error_text) })
      : h(Empty, { title: "No run yet" }, "Each run of the DAG appears here.")),
    h(Members, { data }),
    h(Section, { title: "Spec in force", aside: h(Muted, null, `${data.file}, with every default filled in`) },
      h(Box, { as: "details" }, h(Box, { as: "summary", cursor: "pointer", color: "fg.info" }, "Show"),
        h(Box, { as: "pre", tabIndex: 0, fontSize: "xs", overflowX: "auto", p: 3, bg: "bg.muted", borderRadius: "md", mt: 2 }, data.spec))));
}

const causes = (consumer, row) => h(Flex, { gap: 4, wrap: "wrap" },
  row.failed > 0 && h(A, { to: `${to("retries", consumer)}?state=FAILED` }, "Failed records"),
  row.waiting > 0 && h(A, { to: to("retries", consumer) }, "Waiting records"),
  row.verdict === "critical" && h(A, { to: to("validations", consumer, row.validation_id) }, "Failing rows"),
  row.replaying > 0 && h(A, { to: `${to("rewinds")}?consumer=${encodeURIComponent(consumer)}` }, "Rewinds"),
  h(A, { to: `/dags/${row.dag_id}` }, "DAG"));

const facts = (consumer, { summary: row, flow }) => [
  ["Group", row.group], ["Reads", row.topics.join(", ")], ["Loads into", row.table],
  row.lag && ["Lag", h(Box, null, h(State, { value: row.lag.verdict }), ` ${row.lag.records === null ? "unknown" : counted(row.lag.records, "record")}`,
    row.lag.seconds !== null && `, ${duration(row.lag.seconds)} behind`, h(Muted, { display: "block" }, row.lag.why, " Sampled ", h(Ago, { at: row.lag.sampled_at }), "."))],
  row.lag && row.lag.records > 0 && ["Caught up", row.lag.never ? "never: the lag grows" : row.lag.catch_up_s === null ? "unknown" : `in ${duration(row.lag.catch_up_s)}`],
  row.lag && row.lag.retention_used !== null && ["Retention used", `${Math.round(row.lag.retention_used * 100)} %`],
  ["Last commit", h(Ago, { at: row.committed_at })],
  ["Records", h(Flex, { gap: 3, wrap: "wrap" }, h(A, { to: `${to("retries", consumer)}?state=WAITING` }, `${number(row.waiting ?? 0)} waiting`),
    h(A, { to: `${to("retries", consumer)}?state=FAILED` }, `${number(row.failed ?? 0)} failed`))],
  ["Not validated yet", row.position === undefined || row.position === null ? "–" : counted(row.position - row.validated, "offset")],
  ["Last validation", row.validation_id ? h(A, { to: to("validations", consumer, row.validation_id) }, row.verdict) : "none"],
  ["Next run", row.dag?.is_paused ? h(A, { to: `/dags/${row.dag_id}` }, "The DAG is paused") : h(Due, { at: row.dag?.next_run })],
  ["DAG", h(A, { to: `/dags/${row.dag_id}` }, row.dag_id)],
  ["More", h(Flex, { gap: 3, wrap: "wrap" }, ["rewinds", "audit", "validations"].map((view) =>
    h(A, { key: view, to: `${to(view)}?consumer=${encodeURIComponent(consumer)}` }, view)))],
  ...flow.filter((one) => one.paused).map((one) => [`Paused: ${one.topic ?? "everything"}${one.partition === null ? "" : `/${one.partition}`}`,
    `${one.reason || "no reason given"}, by ${one.changed_by}, ${moment(one.changed_at)}`]),
];

const PARTITIONS = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "Position", end: true, cell: (row) => number(row.position) },
  { name: "End", end: true, cell: (row) => number(row.lag?.log_end) },
  { name: "Lag", end: true, cell: (row) => row.lag ? h(Box, null, number(row.lag.records), row.lag.seconds !== null && h(Muted, { display: "block" }, duration(row.lag.seconds))) : "–" },
  { name: "Validated to", end: true, cell: (row) => number(row.validated) },
  { name: "State", cell: (row) => row.paused ? h(State, { value: "paused" })
    : row.replaying_until !== null ? h(Box, null, h(State, { value: "replaying" }), h(Muted, { display: "block" }, `until ${number(row.replaying_until)}, rewind ${row.rewind_id}`)) : null },
  { name: "Owner", cell: (row) => row.owner ?? h(Muted, null, "nobody") },
  { name: "Seat", cell: (row) => row.seat },
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
  { name: "Attempt", cell: (row) => h(Box, null, `${row.attempt_id} `, h(State, { value: row.state }), row.backfill_of && h(Muted, null, ` backfill of rewind ${row.backfill_of}`)) },
  { name: "DAG run", cell: (row) => h(RunLink, { row }) },
  { name: "Task log", cell: (row) => row.task_id ? h(A, { to: taskPath(row) }, `try ${row.try_number}`) : null },
  { name: "Started", cell: (row) => h(Ago, { at: row.started_at }) },
  { name: "Took", end: true, cell: (row) => row.ended_at ? duration((Date.parse(row.ended_at) - Date.parse(row.started_at)) / 1000) : "still running" },
  { name: "Batches", end: true, cell: (row) => number(row.batches) },
  { name: "Loaded", end: true, cell: (row) => number(row.loaded) },
  { name: "To retry", end: true, cell: (row) => number(row.retried) },
  { name: "Failed", end: true, cell: (row) => number(row.failed) },
  { name: "Error", cell: (row) => row.error },
  ...(consumer ? [{ name: "Rewind", cell: (row) => row.run_id && row.batches > 0
    ? h(A, { to: rewindPath(consumer, "to-batch", `${row.dag_id}/${row.run_id}`), "aria-label": `Rewind to before attempt ${row.attempt_id}` }, "to before it …") : null }] : []),
];

function Members({ data }) {
  const found = data.membership;
  if (!found) return null;
  const held = (member) => Object.entries(member.assignment?.partitions ?? {}).map(([topic, parts]) => `${topic}: ${parts.join(", ")}`).join("; ");
  return h(Section, { title: "Members", aside: h(Muted, null, `${found.state}, generation ${found.generation}, ${found.protocol ?? "no assignor"}` +
    (found.rebalance_reason ? `; last rebalance: ${found.rebalance_reason}` : "")) },
    found.members.length ? h(Rows, { label: "Members", rows: found.members, id: (row) => row.member_id, columns: [
      { name: "Member", cell: (row) => h(Box, null, row.instance_id ?? row.member_id, row.member_id === found.leader && h(Muted, null, " leader")) },
      { name: "Partitions", cell: (row) => held(row) || "none" },
      { name: "Joined", cell: (row) => h(Ago, { at: row.joined_at }) },
      { name: "Seen", cell: (row) => h(Box, null, h(Ago, { at: row.seen_at }), row.overdue && " overdue") },
    ] }) : h(Muted, null, "No member. A consumer with members: 1 needs none; others have members while they run."));
}
