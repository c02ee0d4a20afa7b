// The progress of a requested run, to its end: planned, approved, applied, read again; or why that did not happen.

import { A, Box, Flex, Muted, Notice, Spinner, Text, api, counted, h, number, query, runPath, taskPath, to, useData, useEffect, useState } from "./base.js";

const DONE = { rewind: "Rewound", redrive: "Redriven", discard: "Discarded" };

export function Follow({ kind, consumer, dag, run }) {
  const path = `api/v2/dags/${encodeURIComponent(dag)}/dagRuns/${encodeURIComponent(run)}`;
  const [over, setOver] = useState(false);
  const until = { refresh: !over };
  const { data: dagRun } = useData(path, until);
  const { data: answer } = useData(`${path}/taskInstances`, until);
  const tasks = Object.fromEntries((answer?.task_instances ?? []).map((task) => [task.task_id, task]));
  const did = (task) => kind === "rewind" && tasks[task]?.state === "success";
  const { data: rewinds } = useData(did("plan") ? api("rewinds") + query({ consumer }) : null, until);
  const { data: group } = useData(did("apply") ? api("groups", consumer) : null, until); // positions from before would look as if all were read
  const rewind = rewinds?.rewinds.find((row) => row.dag_id === dag && row.run_id === run);
  const steps = stepsOf({ kind, dag, run, dagRun, tasks, rewind, group, consumer });
  const ended = steps.every((step) => ["done", "failed"].includes(step.state));
  useEffect(() => setOver(ended), [ended]);
  return h(Notice, { tone: toneOf(steps), title: titleOf(steps) },
    h(Box, { as: "ol", "aria-label": "Progress", mt: 1, listStyleType: "none" }, steps.map((step) => h(Flex, { as: "li", key: step.name, gap: 2 },
      h(Box, { w: "1.25rem", flexShrink: 0 }, MARKS[step.state] ?? h(Spinner, { size: "xs" })),
      h(Box, null, h(Text, { as: "span", color: step.state === "later" ? "fg.muted" : undefined }, step.words), " ", step.link && h(A, { to: step.link[1] }, step.link[0]))))),
    steps.filter((step) => step.state === "failed").map((step) => h(Reason, { key: step.name, path: `${path}/taskInstances/${step.name}/logs/${tasks[step.name].try_number}` })),
    h(Box, { mt: 1 }, h(A, { to: runPath({ dag_id: dag, run_id: run }) }, run), h(Muted, null, ` of ${dag}`)),
    ended && h(Box, { mt: 1 }, h(A, { to: to("groups", consumer, kind) }, "Make another request")));
}

// The error at the end of a task's log.
function Reason({ path }) {
  const { data } = useData(path, { refresh: false });
  const entries = Array.isArray(data?.content) ? data.content : [];
  const error = entries.filter((entry) => entry.error_detail?.length).at(-1)?.error_detail.at(-1).exc_value;
  return error ? h(Text, { whiteSpace: "pre-line", overflowWrap: "anywhere", mt: 1 }, error) : null;
}

const MARKS = { done: "✓", failed: "✗", later: "·" };

const toneOf = (steps) => (steps.some((step) => step.state === "failed") ? "error" : steps.every((step) => step.state === "done") ? "success" : "info");

const titleOf = (steps) => ({ error: "It did not happen", success: "Done", info: "Requested" })[toneOf(steps)];

const WAITS = ["awaiting_input", "deferred"];
const FAILED = ["failed", "upstream_failed"];

// The steps: {name, state: "done", "now", "failed" or "later", words, link}.
function stepsOf({ kind, dag, run, dagRun, tasks, rewind, group, consumer }) {
  const at = (task, end = "") => taskPath({ dag_id: dag, run_id: run, task_id: task, map_index: null, try_number: null }) + end;
  const plan = tasks.plan?.state, apply = tasks.apply?.state;
  const steps = [];
  const add = (name, state, words, link) => steps.push({ name, state, words, link });
  if (FAILED.includes(plan)) {
    add("plan", "failed", "The plan was refused. Nothing was changed.", ["Its log says why", at("plan")]);
    return steps;
  }
  if (plan === "success") add("plan", "done", "Planned", rewind && [`Rewind ${rewind.rewind_id}`, to("rewinds", consumer, rewind.rewind_id)]);
  else add("plan", "now", dagRun?.state === "queued" ? `Waits to start. If it does not, check that the DAG ${dag} is not paused.` : "Makes the plan");
  if (FAILED.includes(apply)) {
    add("apply", "failed", "The plan was not applied, or only in part.", ["The log says why", at("apply")]);
    return steps;
  }
  if (apply === "skipped") {
    add("apply", "failed", "Nothing was changed: it was not approved, or only a plan was requested.", ["Log", at("apply")]);
    return steps;
  }
  if (plan === "success" && WAITS.includes(apply)) add("apply", "now", "Waits for approval.", ["Review and approve it", at("apply", "/required_actions")]);
  else add("apply", apply === "success" ? "done" : plan === "success" ? "now" : "later", apply === "success" ? DONE[kind] : "Apply it");
  if (kind !== "rewind") return steps;
  const replays = (group?.partitions ?? []).filter((row) => rewind && row.rewind_id === rewind.rewind_id && row.replaying_until !== null);
  const left = replays.reduce((sum, row) => sum + row.replaying_until - row.position, 0);
  if (apply !== "success") add("read", "later", "Read again");
  else if (left > 0) add("read", "now", `Reads again: ${number(Math.max(0, (rewind.replay ?? 0) - left))} of ${counted(rewind.replay, "offset")}`, ["Group", to("groups", consumer)]);
  else if (group && rewind && rewind.state !== "PLANNED") add("read", "done", `${counted(rewind.replay, "offset")} read again`, ["What has changed", to("rewinds", consumer, rewind.rewind_id)]);
  else add("read", "now", "Reads again");
  return steps;
}
