// The progress of a requested run, to its end: planned, approved, applied, read again; or read beside, approved, swapped; or why that did not
// happen.

import { A, Box, Flex, Muted, Notice, Spinner, Text, api, counted, h, number, query, questionPath, runPath, taskPath, to, useData, useEffect, useState } from "./base.js";

const DONE = { rewind: "Rewound", redrive: "Redriven", discard: "Discarded" };

const apiPath = (row) => `api/v2/dags/${encodeURIComponent(row.dag_id)}/dagRuns/${encodeURIComponent(row.run_id)}`;

// The tasks of a run by their ids, none without a run, and why they are unknown.
export function useTasks(row, until) {
  const { data, error } = useData(row.run_id ? `${apiPath(row)}/taskInstances` : null, until);
  return { tasks: Object.fromEntries((data?.task_instances ?? []).map((task) => [task.task_id, task])), error };
}

export function Follow({ kind, consumer, dag, run }) {
  const row = { dag_id: dag, run_id: run };
  const path = apiPath(row);
  const [over, setOver] = useState(false);
  const until = { refresh: !over };
  const { data: dagRun } = useData(path, until);
  const { tasks } = useTasks(row, until);
  const did = (task) => kind === "rewind" && tasks[task]?.state === "success";
  const { data: rewinds } = useData(did("plan") ? api("rewinds") + query({ consumer }) : null, until);
  const rewind = rewinds?.rewinds.find((each) => each.dag_id === dag && each.run_id === run);
  const beside = kind === "rewind" && Boolean(rewind?.beside ?? dagRun?.conf?.beside);
  const { data: group } = useData(did("apply") && !beside ? api("groups", consumer) : null, until); // positions from before would look as if all were read
  const { data: view } = useData(did("apply") && beside && rewind ? api("groups", consumer, "rewinds", rewind.rewind_id) : null, until);
  const steps = stepsOf({ kind, dag, run, dagRun, tasks, rewind, group, consumer, beside, replay: view?.replay_beside });
  const ended = steps.every((step) => ["done", "failed"].includes(step.state));
  useEffect(() => setOver(ended), [ended]);
  return h(Notice, { tone: toneOf(steps), title: titleOf(steps) },
    h(Box, { as: "ol", "aria-label": "Progress", mt: 1, listStyleType: "none" }, steps.map((step) => h(Flex, { as: "li", key: step.name, gap: 2 },
      h(Box, { w: "1.25rem", flexShrink: 0 }, MARKS[step.state] ?? h(Spinner, { size: "xs" })),
      h(Box, null, h(Text, { as: "span", color: step.state === "later" ? "fg.muted" : undefined }, step.words), " ", step.link && h(A, { to: step.link[1] }, step.link[0]))))),
    steps.filter((step) => step.state === "failed" && FAILED.includes(tasks[step.name]?.state)).map((step) => h(Reason, { key: step.name, path: `${path}/taskInstances/${step.name}/logs/${tasks[step.name].try_number}` })),
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

export const WAITS = ["awaiting_input", "deferred"];
export const FAILED = ["failed", "upstream_failed"];

// The steps: {name, state: "done", "now", "failed" or "later", words, link}.
function stepsOf({ kind, dag, run, dagRun, tasks, rewind, group, consumer, beside, replay }) {
  const row = { dag_id: dag, run_id: run };
  const at = (task) => taskPath({ ...row, task_id: task, map_index: null, try_number: null });
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
  if (plan === "success" && WAITS.includes(apply)) add("apply", "now", "Waits for approval.", ["Review and approve it", questionPath(row, "apply")]);
  else add("apply", apply === "success" ? "done" : plan === "success" ? "now" : "later", beside ? apply === "success" ? "Begun: nothing has changed yet" : "Begin it" : apply === "success" ? DONE[kind] : "Apply it");
  if (beside) addBeside({ add, at, row, tasks, rewind, replay, consumer });
  if (kind !== "rewind" || beside) return steps;
  const replays = (group?.partitions ?? []).filter((row) => rewind && row.rewind_id === rewind.rewind_id && row.replaying_until !== null);
  const left = replays.reduce((sum, row) => sum + row.replaying_until - row.position, 0);
  if (apply !== "success") add("read", "later", "Read again");
  else if (left > 0) add("read", "now", `Reads again: ${number(Math.max(0, (rewind.replay ?? 0) - left))} of ${counted(rewind.replay, "offset")}`, ["Group", to("groups", consumer)]);
  else if (group && rewind && rewind.state !== "PLANNED") add("read", "done", `${counted(rewind.replay, "offset")} read again`, ["What has changed", to("rewinds", consumer, rewind.rewind_id)]);
  else add("read", "now", "Reads again");
  return steps;
}

// The steps of a rewind beside after it has begun.
function addBeside({ add, at, row, tasks, rewind, replay, consumer }) {
  const view = (words) => rewind && [words, to("rewinds", consumer, rewind.rewind_id)];
  const stateOf = (task) => tasks[task]?.state;
  if (rewind?.state === "DISCARDED" || stateOf("approve") === "skipped") {
    add("approve", "failed", "The replay was discarded. No row was changed.", view(`Rewind ${rewind?.rewind_id}`));
    return;
  }
  if (rewind?.state === "APPLIED" || stateOf("swap") === "success") {
    add("replay", "done", "Read beside the live rows");
    if (rewind?.decided_by) add("approve", "done", `Approved by ${rewind.decided_by}`);
    add("swap", "done", "Swapped: readers see the new rows", view("What has changed"));
    return;
  }
  const failed = Object.entries({ replay: "The replay was not read to its end, or is not valid. Nothing was swapped.", approve: "The swap was not approved. Nothing was swapped.",
    swap: "The replay was not swapped." }).find(([task]) => FAILED.includes(stateOf(task)));
  const read = (replay?.groups ?? []).reduce((all, group) => all + group.read, 0), left = (replay?.groups ?? []).reduce((all, group) => all + group.left, 0);
  if (failed?.[0] !== "replay") {
    if (stateOf("replay") === "success") add("replay", "done", replay ? `${counted(read, "offset")} read beside` : "Read beside", view("What a swap would change"));
    else add("replay", stateOf("apply") === "success" ? "now" : "later", replay ? `Reads beside the live rows: ${number(read)} of ${counted(read + left, "offset")}` : "Read beside the live rows", replay && view("Progress"));
  }
  if (failed) {
    add(failed[0], "failed", failed[1], view("How to go on") ?? ["The log says why", at(failed[0])]);
    return;
  }
  if (WAITS.includes(stateOf("approve"))) add("approve", "now", "Waits for approval of the swap.", ["Review and approve it", questionPath(row, "approve")]);
  else add("approve", stateOf("approve") === "success" ? "done" : stateOf("replay") === "success" ? "now" : "later", stateOf("approve") !== "success" ? "Approve the swap" : rewind?.decided_by ? `Approved by ${rewind.decided_by}` : "Needs no approval");
  add("swap", stateOf("approve") === "success" ? "now" : "later", stateOf("approve") === "success" ? "Reads the last records, and swaps" : "Swap it");
}
