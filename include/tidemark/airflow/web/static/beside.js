// A replay beside that is neither swapped nor discarded: its progress, its validations, and how it ends.

import { Ago, Box, Flex, LinkButton, Muted, Notice, RunLink, Section, State, Text, counted, h, moment, number, questionPath, to } from "./base.js";
import { FAILED, WAITS, useTasks } from "./follow.js";
import { Rows } from "./table.js";

const sum = (replay, name) => replay.groups.reduce((all, group) => all + group[name], 0);

// "60 of 100 offsets"
export const besideProgress = (replay) => `${number(sum(replay, "read"))} of ${counted(sum(replay, "read") + sum(replay, "left"), "offset")}`;

// A critical verdict needs a decision; nothing else here is an incident.
const toneOf = (replay) => (replay.groups.some((group) => group.validations.some((validation) => validation.verdict === "critical")) ? "warning" : "info");

const About = ({ replay }) => h(Box, null,
  h(Text, null, "Readers see the old rows, and the group reads on, until the swap. Begun by ", replay.started_by, " ", h(Ago, { at: replay.started_at }), `, ${moment(replay.started_at)}; kept until ${moment(replay.kept_until)}.`),
  replay.held_until && h(Text, null, `The swap is going on: until ${moment(replay.held_until)} at the latest, the group begins no batch.`));

// On the first screen of the group.
export const BesideNotice = ({ consumer, replay }) => h(Notice, { tone: toneOf(replay), title: `Rewind ${replay.rewind_id} is read beside the live rows: ${besideProgress(replay)}` },
  h(About, { replay }), h(Flex, { gap: 2, mt: 2 }, h(LinkButton, { to: to("rewinds", consumer, replay.rewind_id) }, "Compare, swap or discard …")));

// In the view of the rewind.
export const Beside = ({ replay }) => h(Box, null,
  h(Notice, { tone: toneOf(replay), title: `Read beside the live rows: ${besideProgress(replay)}` }, h(About, { replay }), h(Decide, { replay })),
  replay.groups.map((group) => h(Section, { key: group.consumer, title: `Replay of ${group.consumer}`, aside: h(Muted, null, group.left ? `${counted(group.left, "offset")} behind the group` : "level with the group") },
    h(Bar, { group }), h(Findings, { group }),
    h(Rows, { label: `Replay of ${group.consumer}`, rows: group.partitions, id: (row) => `${row.topic}/${row.partition}`, columns: COLUMNS }))));

const COLUMNS = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "From", end: true, cell: (row) => number(row.start) },
  { name: "Read to", end: true, cell: (row) => number(row.position) },
  { name: "Group at", end: true, cell: (row) => number(row.end) },
  { name: "Read", end: true, cell: (row) => number(row.read) },
  { name: "Left", end: true, cell: (row) => number(row.left) },
];

function Bar({ group }) {
  const all = group.read + group.left;
  return h(Box, { role: "progressbar", "aria-label": `Replay of ${group.consumer}`, "aria-valuemin": 0, "aria-valuemax": all, "aria-valuenow": group.read, h: "6px", maxW: "30rem", mb: 3, bg: "bg.emphasized", borderRadius: "full", overflow: "hidden" },
    h(Box, { h: "100%", bg: "brand.solid", style: { width: `${all ? (100 * group.read) / all : 100}%` } }));
}

// What the validations of the replay say, and which records it has not loaded.
const Findings = ({ group }) => h(Box, { as: "ul", "aria-label": `Findings of ${group.consumer}`, fontSize: "sm", mb: 3, listStyleType: "none" },
  group.validations.length === 0 && h("li", null, "Not validated yet."),
  group.validations.map((validation) => h("li", { key: validation.validation_id }, "Validation ", h(State, { value: validation.verdict }), " ", h(Muted, null, `${counted(validation.sink_rows, "row")}, `, h(Ago, { at: validation.validated_at })),
    validation.failing.length > 0 && h(Muted, { display: "block", overflowWrap: "anywhere" }, `Failing: ${validation.failing.join("; ")}`))),
  group.errors.map((error) => h(Box, { as: "li", key: `${error.state}/${error.error_type}`, overflowWrap: "anywhere" }, `${counted(error.records, "record")} not loaded: ${error.error_type}`, error.example && h(Muted, null, ` ${error.example}`))));

// Swap and discard are answers to the question of the DAG run that began the replay; no swap command leads past that question. A replay that
// was begun on the command line ends there.
function Decide({ replay }) {
  const { tasks, error } = useTasks(replay);
  const of = { dag_id: replay.dag_id, run_id: replay.run_id };
  const swap = `tidemark rewind swap ${replay.rewind_id}`, discard = `tidemark rewind discard ${replay.rewind_id} --reason "…"`;
  if (replay.transform) return h(Commands, { commands: [discard] }, `It only rehearses the transform ${replay.transform}, and is never swapped:`);
  if (!replay.run_id) return h(Commands, { commands: [swap, discard] }, "It was begun on the command line, and ends there:");
  if (WAITS.includes(tasks.approve?.state)) {
    return h(Box, { mt: 2 }, h(Flex, { gap: 2, wrap: "wrap" },
      h(LinkButton, { to: questionPath(of, "approve"), variant: "solid", colorPalette: "brand" }, "Swap …"), h(LinkButton, { to: questionPath(of, "approve") }, "Discard …")),
    h(Muted, { display: "block", mt: 1 }, "Both lead to the question of its DAG run: Approve swaps, Reject discards."));
  }
  const failed = ["replay", "approve", "swap"].find((task) => FAILED.includes(tasks[task]?.state));
  if (failed) {
    return h(Commands, { commands: [discard] }, `The task ${failed} of its DAG run has failed: `, h(RunLink, { row: of }), ". Fix the cause and clear the task, or discard the replay on the command line:");
  }
  if (error?.status === 404) return h(Commands, { commands: [discard] }, "Its DAG run is no longer in Airflow, and so nobody can approve the swap. Discard the replay on the command line:");
  return h(Text, { mt: 2 }, "Its DAG run goes on: ", h(RunLink, { row: of }), ". If an approval is required, the run asks for it when everything is read.");
}

const Commands = ({ commands, children }) => h(Box, { mt: 2 }, h(Text, null, children), commands.map((command) =>
  h(Box, { key: command, as: "pre", fontSize: "xs", bg: "bg.muted", px: 3, py: 1, mt: 1, borderRadius: "md", overflowX: "auto", tabIndex: 0, userSelect: "all" }, command)));
