// One group. Its first screen answers: is it right, how far behind is it, what is to be done. Facts that are rarely read are folded.

import { A, Ago, Banners, Box, Code, Due, Empty, Facts, Flex, Folded, LinkButton, Loaded, Muted, Notice, Query, RunLink, Section, Sized, State, Text,
  Title, api, atMost, coded, counted, discardPath, duration, h, moment, number, query, rate, redrivePath, rewindPath, takenOver, taskPath, to, toneOf, useData } from "./base.js";
import { BesideNotice } from "./beside.js";
import { LagChart, Timeline } from "./chart.js";
import { Rows } from "./table.js";

export const Group = ({ consumer }) => {
  const state = useData(api("groups", consumer));
  return h(Loaded, { state }, (data) => h(View, { consumer, data }));
};

const GOOD = ["ok", "idle", "running"];

function View({ consumer, data }) {
  const { summary } = data;
  const answered = !data.banners.length; // the database
  return h(Box, null,
    h(Title, { text: consumer }, h(State, { value: summary.health }), GOOD.includes(summary.health) && h(Muted, null, summary.why),
      data.forms.rewind && h(LinkButton, { to: rewindPath(consumer) }, "Rewind …")),
    summary.description && h(Text, { color: "fg.muted" }, summary.description),
    h(Banners, { banners: data.banners }),
    data.problems.length > 0 && h(Notice, { tone: "error", role: "alert", title: `${data.file} has ${counted(data.problems.length, "problem")}` },
      data.problems.map((problem) => h(Text, { key: problem.at }, h(Code, null, problem.at), ` ${problem.message}${problem.fix && `: ${problem.fix}`}`))),
    h(Problem, { consumer, data }),
    data.replay_beside && h(BesideNotice, { consumer, replay: data.replay_beside }),
    summary.failed > 0 && h(FailedRecords, { consumer, data }),
    h(Figures, { consumer, data }),
    answered && h(Partitions, { data }),
    data.history.length > 1 && h(Section, { title: "Lag", aside: h(Muted, null, "the largest of each 5 minutes of the last day, in records; rewinds in purple, rebalances in grey, failed runs in red") },
      h(Sized, null, (width) => h(LagChart, { consumer: data.forms.rewind && consumer, width, history: data.history, rewinds: data.rewinds, rebalances: data.rebalances,
        failed: data.attempts.filter((attempt) => attempt.state === "FAILED" && !takenOver(attempt)) }))),
    data.history.length === 1 && h(Section, { title: "Lag" }, h(Muted, null, "The chart begins with the second sample.")),
    data.lost.length > 0 && h(Section, { title: "Lost ranges", aside: h(Muted, null, "offsets that were never read") },
      h(Rows, { label: "Lost ranges", rows: data.lost, id: (row) => `${row.topic}/${row.partition}@${row.start_offset}`, columns: LOST }), h(Query, { text: data.queries.lost })),
    answered && h(Section, { title: "Batches", aside: h(Muted, null, "the last runs; a colour for each attempt, red for a failed one; dashed where an attempt failed (red) or a newer one took over (purple)") },
      h(Sized, null, (width) => h(Timeline, { consumer: data.forms.rewind && consumer, width, batches: data.batches, attempts: data.attempts })), h(Query, { text: data.queries.batches })),
    answered && h(Section, { title: "Attempts" }, data.attempts.length
      ? h(Rows, { label: "Attempts", rows: data.attempts, id: (row) => row.attempt_id, columns: attempts(data.forms.rewind && consumer), details: outcome })
      : h(Empty, { title: "No run yet" }, "Each run of the DAG appears here."), h(Query, { text: data.queries.attempts })),
    h(Folded, { title: "About this group", aside: "topics, table, transform, DAG" }, h(Facts, { rows: facts(consumer, data) })),
    answered && h(Members, { data }),
    h(Rebalances, { generations: data.rebalances, query: data.queries.rebalances }),
    h(Folded, { title: "Effective spec", aside: `${data.file}, with every default filled in` },
      h(Box, { as: "pre", tabIndex: 0, fontSize: "xs", overflowX: "auto", p: 3, bg: "bg.muted", borderRadius: "md" }, data.spec)));
}

// A button for each [words, path]; the first one fixes the problem.
const Actions = ({ actions }) => h(Flex, { gap: 2, mt: 2, wrap: "wrap" }, actions.filter(([, path]) => path).map(([words, path], index) =>
  h(LinkButton, { key: words, to: path, ...(index ? {} : { variant: "solid", colorPalette: "brand" }) }, words)));

// What is wrong with the group, in the colour of its kind, and what fixes it.
function Problem({ consumer, data }) {
  const { summary: row, forms } = data;
  if ([...GOOD, "bad spec", "unreachable", "records failed"].includes(row.health)) return null;
  const dag = `/dags/${row.dag_id}`;
  const broken = data.attempts.find((attempt) => attempt.attempt_id === row.attempt_id && attempt.state === "FAILED");
  const rewinds = `${to("rewinds")}${query({ consumer })}`;
  const validated = forms.rewind && rewindPath(consumer, "to-validated");
  const actions = {
    "run failed": [["Task log", broken && taskPath(broken)], ["DAG", dag], ["Rewind …", forms.rewind && rewindPath(consumer)]],
    stopped: [["Task log", broken && taskPath(broken)], ["DAG", dag]],
    blocked: [["Failing rows", row.blocked_by && to("validations", consumer, row.blocked_by)], ["Rewind to the validated rows …", validated]],
    replaying: [["Rewinds", rewinds]],
    "records wait": [["Waiting records", to("retries", consumer)]],
    "not validated": [["DAG", dag], ["Rewind to the validated rows …", validated]],
  }[row.health] ?? [["DAG", dag]];
  const waiting = row.health === "records wait" && mostFrequent(data.errors, ["WAITING", "HELD"]);
  const failing = row.health === "blocked" && data.failing.length ? ` Failing: ${data.failing.join(", ")}.` : "";
  const title = waiting ? `${counted(row.waiting, "record waits", "records wait")} for the next try${waiting}` : row.why;
  const tone = toneOf(row.health);
  return h(Notice, { tone, role: tone === "error" ? "alert" : "status", title: title + failing },
    h(Text, null, row.fix ? coded(row.fix) : "Nothing has to be done."), h(Actions, { actions }));
}

const CHARACTERS = 200;

// The most frequent error of the records in these states: ": amount is text", or ", 30 of them with ValueError: amount is text".
function mostFrequent(errors, states) {
  const [first, ...others] = errors.filter((error) => states.includes(error.state));
  if (!first) return "";
  const text = first.example.length > CHARACTERS ? `${first.example.slice(0, CHARACTERS)}…` : first.example;
  if (others.length) return `, ${number(first.records)} of them with ${first.error_type}${text && `: ${text}`}`;
  return first.texts > 1 ? ` with ${first.error_type}, for example: ${text}` : `: ${text || first.error_type}`;
}

function FailedRecords({ consumer, data }) {
  const { summary, forms } = data;
  const why = mostFrequent(data.errors, ["FAILED"]);
  const failed = summary.failed >= data.most ? `${number(data.most)} or more records` : counted(summary.failed, "record");
  return h(Notice, { tone: toneOf("records failed"), title: `${failed} failed${why}` },
    h(Text, null, "They are not retried automatically."),
    h(Actions, { actions: [["Redrive …", forms.redrive && redrivePath(consumer)], ["Failed records", `${to("retries", consumer)}?state=FAILED`],
      ["Discard …", forms.discard && discardPath(consumer, { state: "FAILED" })]] }));
}

const Figure = ({ name, children, more }) => h(Box, { borderWidth: "1px", borderRadius: "md", px: 3, py: 2, minW: 0 },
  h(Box, { as: "dt", color: "fg.muted", fontSize: "xs" }, name),
  h(Box, { as: "dd", m: 0, overflowWrap: "anywhere" }, h(Box, { fontWeight: "semibold", fontSize: "md", fontVariantNumeric: "tabular-nums" }, children), more && h(Muted, { display: "block", fontSize: "xs" }, more)));

// How far behind the group is, and what happens next.
function Figures({ consumer, data: { summary: row, lag, unvalidated, flow, most } }) {
  const records = row.lag?.records ?? null;
  const paused = flow.filter((pause) => pause.paused);
  return h(Box, null,
    h(Box, { as: "dl", "aria-label": "Now", display: "grid", gap: 2, mt: 3, gridTemplateColumns: { base: "repeat(2, minmax(0, 1fr))", md: "repeat(auto-fit, minmax(9.5rem, 1fr))" } },
      h(Figure, { name: "Lag", more: row.lag && h("span", null, row.lag.seconds === null ? "time unknown" : row.lag.seconds ? `${duration(row.lag.seconds)} behind` : "nothing waits", ", sampled ", h(Ago, { at: row.lag.sampled_at })) },
        !row.lag ? "unknown" : records !== null ? counted(records, "record") : row.lag.known_records ? `≥ ${counted(row.lag.known_records, "record")}` : "unknown"),
      lag && records > 0 && h(Figure, { name: "Caught up", more: `in ${rate(lag.produced_per_s)} / s, out ${rate(lag.consumed_per_s)} / s` },
        lag.never ? "never: the lag grows" : lag.catch_up_s === null ? "unknown" : `in ${duration(lag.catch_up_s)}`),
      h(Figure, { name: "Last commit", more: row.attempt_state && h("span", null, "last run: ", h(RunLink, { row }, row.attempt_state.toLowerCase())) }, h(Ago, { at: row.committed_at })),
      h(Figure, { name: "Next run", more: row.schedule }, row.dag?.is_paused ? h(A, { to: `/dags/${row.dag_id}` }, "The DAG is paused") : !row.schedule ? "not scheduled" : h(Due, { at: row.dag?.next_run })),
      row.health !== "unreachable" && h(Figure, { name: "Not loaded", more: h(A, { to: to("retries", consumer) }, "retries") }, h(A, { to: `${to("retries", consumer)}?state=WAITING` }, `${atMost(row.waiting ?? 0, most)} waiting`), ", ",
        h(A, { to: `${to("retries", consumer)}?state=FAILED` }, `${atMost(row.failed ?? 0, most)} failed`)),
      h(Figure, { name: "Validation", more: unvalidated ? `${counted(unvalidated, "offset")} not validated yet` : null },
        row.validation_id ? h(A, { to: to("validations", consumer, row.validation_id) }, row.verdict) : "none")),
    paused.map((pause) => h(Text, { key: `${pause.topic}/${pause.partition}`, fontSize: "sm", mt: 2 },
      `Paused: ${pause.topic ?? "everything"}${pause.partition === null ? "" : `/${pause.partition}`}, ${pause.reason || "no reason given"}, by ${pause.changed_by}, ${moment(pause.changed_at)}`)));
}

const transformOf = (consumer, { transform, file }) => transform === null
  ? h(Muted, null, "none, fields become columns")
  : h(Box, null, file ? h(A, { to: to("groups", consumer, "transform") }, transform) : transform, h(Muted, null, ` ${file ?? "an installed module"}`));

const facts = (consumer, { summary: row, lag, source }) => [
  ["Group", row.group], ["Reads", row.topics.join(", ")], ["Loads into", row.table],
  ["Transform", transformOf(consumer, source)],
  lag && lag.retention_used !== null && ["Retention used", `${Math.round(lag.retention_used * 100)} %`],
  ["DAG", h(Flex, { gap: 3, wrap: "wrap" }, h(A, { to: `/dags/${row.dag_id}` }, row.dag_id), h(A, { to: `/dags/${row.dag_id}/code` }, "code"))],
  ["More", h(Flex, { gap: 3, wrap: "wrap" }, ["rewinds", "audit", "validations"].map((view) =>
    h(A, { key: view, to: `${to(view)}${query({ consumer })}` }, view)))],
];

const SHOWN = 6;

// The partitions; of many, first the ones with the most records to read.
function Partitions({ data: { partitions, partitions_in_all: all } }) {
  const many = partitions.length > SHOWN;
  const rows = many ? partitions.toSorted((a, b) => (b.lag?.records ?? -1) - (a.lag?.records ?? -1)) : partitions;
  return h(Section, { title: "Partitions", aside: h(Muted, null, `${counted(all ?? 0, "partition")}${many ? ", the largest lag first" : ""}`) },
    rows.length ? h(Rows, { label: "Partitions", first: SHOWN, rows, id: (row) => `${row.topic}/${row.partition}/${row.epoch}`, columns: PARTITIONS })
      : h(Empty, { title: "No partition has been claimed yet" }, "The first run claims them. Start the consumer's DAG."));
}

const PARTITIONS = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "Lag", end: true, cell: (row) => number(row.lag?.records) },
  { name: "Behind", end: true, cell: (row) => duration(row.lag?.seconds) },
  { name: "Position", end: true, cell: (row) => number(row.position) },
  { name: "End", end: true, cell: (row) => number(row.lag?.log_end) },
  { name: "In / s", end: true, cell: (row) => rate(row.lag?.produced_per_s) },
  { name: "Out / s", end: true, cell: (row) => rate(row.lag?.consumed_per_s) },
  { name: "State", cell: (row) => row.paused ? h(State, { value: "paused" })
    : row.replaying_until !== null ? h(Box, null, h(State, { value: "replaying" }), h(Muted, { display: "block" }, `until ${number(row.replaying_until)}, rewind ${row.rewind_id}`)) : null },
  { name: "Owner", cell: (row) => row.owner ?? h(Muted, null, "nobody") },
  { name: "Committed", cell: (row) => h(Ago, { at: row.committed_at }) },
  { name: "Validated to", end: true, cell: (row) => number(row.validated) },
  { name: "Epoch", end: true, cell: (row) => number(row.epoch) },
];

const LOST = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "From", end: true, cell: (row) => number(row.start_offset) },
  { name: "To", end: true, cell: (row) => row.end_offset === null ? "unknown" : number(row.end_offset) },
  { name: "Why", cell: (row) => row.reason },
  { name: "Recorded", cell: (row) => h(Ago, { at: row.recorded_at }) },
];

// A second line of an attempt: what ended it.
const outcome = (row) => row.error_text && h(Muted, { overflowWrap: "anywhere" },
  takenOver(row) ? "A newer attempt or a rewind took over its partitions; it stored nothing more, and nothing was loaded twice." : row.error_text);

const attempts = (consumer) => [
  { name: "Attempt", cell: (row) => h(Box, null, `${row.attempt_id} `, h(State, { value: takenOver(row) ? "TAKEN OVER" : row.state }), row.of_rewind && h(Muted, null, ` for rewind ${row.of_rewind}`)) },
  { name: "DAG run", cell: (row) => h(RunLink, { row }) },
  { name: "Task log", cell: (row) => row.task_id ? h(A, { to: taskPath(row) }, `try ${row.try_number}`) : null },
  { name: "Started", cell: (row) => h(Ago, { at: row.started_at }) },
  { name: "Took", end: true, cell: (row) => row.ended_at ? duration((Date.parse(row.ended_at) - Date.parse(row.started_at)) / 1000) : "still running" },
  { name: "Batches", end: true, cell: (row) => number(row.batches) },
  { name: "Loaded", end: true, cell: (row) => h(Box, null, number(row.loaded), row.deleted > 0 && h(Muted, { display: "block" }, counted(row.deleted, "delete"))) },
  { name: "To retry", end: true, cell: (row) => number(row.retried) },
  { name: "Failed", end: true, cell: (row) => number(row.failed) },
  { name: "Error", cell: (row) => takenOver(row) ? null : row.error },
  ...(consumer ? [{ name: "Rewind", cell: (row) => row.run_id && row.batches > 0 && row.of_rewind === null
    ? h(A, { to: rewindPath(consumer, "to-batch", `${row.dag_id}/${row.run_id}`), "aria-label": `Rewind to before attempt ${row.attempt_id}` }, "to before it …") : null }] : []),
];

// The group's members, and the static members of the consumer's mapped task, whether they have joined or not.
function Members({ data }) {
  const membership = data.membership;
  const members = membership?.members ?? [];
  if (!data.instances.length && !members.length) {
    return h(Folded, { title: "Members" }, h(Muted, null, "This consumer has no members: each run reads all of its partitions. members: 2 or more in its file makes a group."));
  }
  const instances = data.instances.map((instance) => ({ ...instance, member: members.find((member) => member.instance_id === instance.instance) }));
  const others = members.filter((member) => !data.instances.some((instance) => instance.instance === member.instance_id)).map((member) => ({ instance: null, member }));
  return h(Folded, { title: "Members", aside: membership && `${membership.state}, generation ${membership.generation}${membership.protocol ? `, ${membership.protocol}` : ""}` },
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
  if (!generations.length) return null;
  return h(Folded, { title: "Rebalances", aside: "generations, newest first" },
    h(Rows, { label: "Rebalances", first: REBALANCES, rows: generations, id: (row) => row.generation, columns: [
      { name: "Generation", cell: (row) => row.generation },
      { name: "When", cell: (row) => h(Ago, { at: row.at }) },
      { name: "Why", cell: (row) => h(Box, { maxW: "22rem" }, row.reason) },
      { name: "Members", end: true, cell: (row) => number(row.members) },
      { name: "Moved", cell: (row) => row.moves === null ? h(Muted, null, "unknown: the generation before is not stored") : row.moves.length === 0 ? h(Muted, null, "nothing")
        : row.moves.map((move) => h(Box, { key: `${move.from}>${move.to}`, overflowWrap: "anywhere" }, move.what, h(Muted, null, ` ${move.from ?? "nobody"} → ${move.to ?? "nobody"}`))) },
    ] }),
    h(Query, { text: query }));
}
