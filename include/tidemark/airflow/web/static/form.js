// The forms that ask Airflow for a run of `rewind`, `redrive` or `discard`, as the user who is signed in. The run makes a plan and checks everything.

import { A, Box, Button, Code, Field, Flex, Input, Loaded, Muted, Notice, Section, Select, Text, Textarea, Title, api, counted, fromLocal, h, local, moment,
  query, request, to, useData, useParam, useState, zone, zoned } from "./base.js";
import { Follow } from "./follow.js";
import { Preview, usePreview, useSettled } from "./preview.js";

// The form of the DAG `kind`.
export function Form({ kind, consumer }) {
  const state = useData(api("groups", consumer, "form"), { refresh: false });
  const [run, follow] = useParam("run"); // the requested run, so that the way back from its page leads to its progress
  const [title, View] = { rewind: ["Rewind", Rewind], redrive: ["Redrive records of", Redrive], discard: ["Discard records of", Discard] }[kind];
  return h(Box, null, h(Title, { text: `${title} ${consumer}` }, h(A, { to: to("groups", consumer) }, "Group"), kind !== "rewind" && h(A, { to: to("retries", consumer) }, "Retries")), h(Loaded, { state }, (data) => data.forms[kind]
    ? run ? h(Follow, { kind, consumer, dag: data.forms[kind], run }) : h(View, { consumer, data, follow })
    : h(Notice, { tone: "warning", role: "alert", title: "Your roles do not allow this" },
      `You need the permission to start the DAG ${data.own ? `${kind}__${consumer}` : kind}. Ask an administrator.`)));
}

// A scenario in words, with its name at the command line.
const inWords = (choice) => `${choice.does[0].toUpperCase()}${choice.does.slice(1)} (${choice.name})`;

function Rewind({ consumer, data, follow }) {
  const [scenario, setScenario] = useParam("scenario", "to-validated");
  const [value, setValue] = useParam("value");
  const [scope, setScope] = useParam("scope", "all");
  const [reason, setReason] = useState("");
  const [loss, setLoss] = useState(false);
  const [consume, setConsume] = useState(true);
  const [wanted, setWanted] = useState(false);
  const choices = data.scenarios.filter((choice) => choice.name !== "from-file");
  const chosen = choices.find((choice) => choice.name === scenario) ?? choices[0];
  const choose = (name, next) => {
    setScenario(name);
    setValue(next);
  };
  const complete = !chosen.value || Boolean(value.trim());
  const notBeside = chosen.name === "undo" ? "An undo puts rows back at once." : data.not_beside;
  const beside = wanted && !notBeside;
  const preview = usePreview(consumer, complete && { scenario: chosen.name, value: chosen.value ? value.trim() : "", scope, allow_loss: loss, ...(beside ? { beside } : {}) });
  const problems = [
    chosen.value && !value.trim() && `Choose ${chosen.value}.`,
    preview.data?.problems.length > 0 && "The plan would be refused, as the preview says.",
    unreasoned(data, reason),
  ].filter(Boolean);
  const consumers = preview.data?.consumers ?? [consumer]; // an undo moves all consumers of the rewind
  const conf = { ...(data.own ? {} : { consumers }), scope, scenario: chosen.name, ...(chosen.value ? { value: value.trim() } : {}),
    reason: reason.trim(), allow_loss: loss, ...(beside ? { beside, consume: false } : { consume }) };
  const says = [
    `${consumers.join(", ")}, ${scope === "all" ? "all partitions" : scope}: ${preview.data?.says ? zoned(preview.data.says) : inWords(chosen) + (chosen.value ? ` ${value}` : "")}`,
    beside ? `The records are read into tables beside ${data.table} while its readers see the old rows. Then the swap puts the new rows in their place, in one transaction, and keeps the old ones in an archive, so that the rewind can be undone.`
      : `Rows loaded from there on are taken out of ${data.table} and kept in an archive, so that the rewind can be undone.`,
    beside ? data.approval === "required" ? "Nothing changes before somebody approves the swap." : "A valid replay is swapped at once, without an approval."
      : data.approval === "required" ? "Somebody has to approve the plan first." : "The plan is applied at once, without an approval.",
    loss && "Records that Kafka no longer has are recorded as lost.",
    !beside && (consume ? "A run of the consumer starts afterwards." : "No run starts afterwards."),
  ];
  return h(Box, { maxW: "64rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Makes a plan first, with the offsets, rows and failed records of each partition. ",
      data.approval === "required" ? `Nothing changes before somebody approves ${beside ? "the swap" : "it"} in the DAG run.`
        : beside ? "This consumer needs no approval: a valid replay is swapped at once." : "This consumer needs no approval: the plan is applied at once."),
    h(Flex, { direction: "column", gap: 4, mt: 4, maxW: "44rem" },
      h(Presets, { data, choose }),
      h(Field, { label: "Where to" }, h(Select, { label: "Scenario", value: chosen.name, onChange: (name) => choose(name, ""), w: "100%", options: choices.map((choice) => [choice.name, inWords(choice)]) })),
      chosen.value && h(Value, { chosen, value, onChange: setValue }),
      h(Field, { label: "Topics and partitions", hint: examples(data.topics) },
        h(Input, { size: "sm", name: "scope", value: scope, onChange: (event) => setScope(event.target.value) })),
      h(Reason, { value: reason, onChange: setReason }),
      h(Check, { value: loss, onChange: setLoss, label: "Allow loss: if Kafka no longer has the records, record the gap as lost" }),
      notBeside ? h(Muted, null, `It cannot be read beside the live rows. ${notBeside}`)
        : h(Check, { value: wanted, onChange: setWanted, label: "Read beside the live rows, compare, then swap: readers never see a gap" }),
      !beside && h(Check, { value: consume, onChange: setConsume, label: "Start a run of the consumer afterwards" })),
    h(Preview, { preview, complete, beside }),
    h(Send, { follow, dag: data.forms.rewind, conf, problems, verb: "Request the rewind", says }));
}

const examples = ([topic = "flights"]) => `For example: all, ${topic}, or ${topic}:0,1,5-9`;

// Frequent targets, one click each.
function Presets({ data, choose }) {
  const midnight = fromLocal(`${local(Date.now() - 86400000).slice(0, 10)}T00:00:00`);
  const presets = [
    ["yesterday 00:00", "to-datetime", midnight],
    ...data.runs.map((run) => [`before the run of ${moment(run.started_at).slice(0, 16)}`, "to-batch", `${run.dag_id}/${run.run_id}`]),
    data.first_failed_batch !== null && ["before the first failure", "to-batch", data.first_failed_batch],
  ].filter(Boolean);
  return h(Flex, { gap: 2, wrap: "wrap", role: "group", "aria-label": "Frequent targets" },
    presets.map(([words, name, value]) => h(Button, { key: value, size: "xs", variant: "outline", onClick: () => choose(name, String(value)) }, words)));
}

function Value({ chosen, value, onChange }) {
  if (chosen.name !== "to-datetime") {
    return h(Field, { label: `Value: ${chosen.value}`, hint: `Example: ${chosen.example}` },
      h(Input, { size: "sm", name: "value", value, onChange: (event) => onChange(event.target.value) }));
  }
  const time = Date.parse(value);
  return h(Field, { label: "Time", hint: `In ${zone()}, the time zone chosen in Airflow.${Number.isNaN(time) ? "" : ` ${moment(value)}`}` },
    h(Input, { size: "sm", name: "value", type: "datetime-local", step: 1, maxW: "16rem", value: Number.isNaN(time) ? "" : local(time), onChange: (event) => onChange(fromLocal(event.target.value)) }));
}

// The fields that choose records, kept in the address: [the filter, the fields].
function useRecords() {
  const error = useParam("error"), text = useParam("text"), numbers = useParam("numbers"), tier = useParam("tier");
  const field = (label, name, [value, set], hint) =>
    h(Field, { key: name, label, hint }, h(Input, { size: "sm", name, value, onChange: (event) => set(event.target.value) }));
  const filter = Object.fromEntries(Object.entries({ error, text, numbers, tier }).map(([name, [value]]) => [name, value.trim()]).filter(([, value]) => value));
  return [filter, [field("Error type", "error", error), field("Error text", "text", text, "Any part of it."),
    field("Record numbers", "numbers", numbers, "Separated by commas."), field("Tier", "tier", tier, "A delay such as 5m, or failed.")]];
}

const Reason = ({ value, onChange }) => h(Field, { label: "Reason", hint: "Kept permanently, with your name." },
  h(Textarea, { size: "sm", name: "reason", rows: 2, value, onChange: (event) => onChange(event.target.value) }));

const Then = ({ value, onChange, verb }) => h(Field, { label: "After the plan" }, h(Select, { label: "After the plan", value, onChange,
  options: [["ask", "ask for approval first"], ["apply", `${verb} the records`], ["nothing", "nothing (dry run)"]] }));

const unreasoned = (data, reason) => reason.trim().length < data.reason_characters && `Give a reason of at least ${data.reason_characters} characters.`;

function Redrive({ consumer, data, follow }) {
  const [filter, fields] = useRecords();
  const [where, setWhere] = useParam("to", data.redrive_to);
  const [then, setThen] = useState("ask");
  const [reason, setReason] = useState("");
  const conf = { ...(data.own ? {} : { consumer }), ...filter, to: where, then, reason: reason.trim() };
  const match = useMatching(consumer, "redrive", filter);
  const problems = [match.records === 0 && "No record matches.", unreasoned(data, reason)].filter(Boolean);
  return h(Box, { maxW: "44rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Sends failed records through the retry topics again. A record must match every filter."),
    h(Flex, { direction: "column", gap: 4, mt: 4 }, fields,
      h(Field, { label: "Where to" }, h(Select, { label: "Where to", value: where, onChange: setWhere,
        options: [...(data.redrive_to === "ladder" ? [["ladder", "all retry delays again, from the first"]] : []), ["now", "one try, at once"]] })),
      h(Then, { value: then, onChange: setThen, verb: "redrive" }), h(Reason, { value: reason, onChange: setReason })),
    h(Matching, { match, verb: "can be redriven" }),
    h(Send, { follow, dag: data.forms.redrive, conf, problems, verb: "Request the redrive", says: [
      `${match.words ?? "The matching failed records"} of ${consumer} ${where === "now" ? "get one try, at once" : "go through all retry delays again"}.`, afterPlan(then)] }));
}

function Discard({ consumer, data, follow }) {
  const [filter, fields] = useRecords();
  const [state, setState] = useParam("state");
  const [then, setThen] = useState("ask");
  const [reason, setReason] = useState("");
  const chosen = { ...filter, ...(state ? { states: [state] } : {}) };
  const conf = { ...(data.own ? {} : { consumer }), ...chosen, then, reason: reason.trim() };
  const match = useMatching(consumer, "discard", { ...filter, state });
  const problems = [!Object.keys(chosen).length && "Choose records: a state or another filter.", match.records === 0 && "No record matches.", unreasoned(data, reason)].filter(Boolean);
  return h(Box, { maxW: "44rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Settles records without loading them: they are never tried again, unless somebody redrives them. A record must match every filter."),
    h(Flex, { direction: "column", gap: 4, mt: 4 },
      h(Field, { label: "State" }, h(Select, { label: "State", value: state, onChange: setState,
        options: [["", "waiting, held or failed"], ["FAILED", "failed"], ["WAITING", "waiting"], ["HELD", "held"]] })),
      fields, h(Then, { value: then, onChange: setThen, verb: "discard" }), h(Reason, { value: reason, onChange: setReason })),
    h(Matching, { match, verb: "would be discarded" }),
    h(Send, { follow, dag: data.forms.discard, conf, problems, verb: "Request the discard",
      says: [`${match.words ?? "The matching records"} of ${consumer} are settled without being loaded.`, afterPlan(then)] }));
}

const afterPlan = (then) => ({ ask: "Somebody has to approve the plan first.", apply: "The plan is applied at once.", nothing: "Only the plan is made; nothing changes." })[then];

// How many records the filter chooses now: {records, words}.
function useMatching(consumer, kind, filter) {
  const { data, error } = useSettled(api("groups", consumer, "matching") + query({ kind, ...filter }));
  return { records: data?.records, words: data ? counted(data.records, "record") : null, error };
}

const Matching = ({ match, verb }) => h(Text, { role: "status", "aria-label": "Matching records", mt: 4, fontWeight: "medium" },
  match.error ? `The records cannot be counted: ${match.error.message}` : match.words ? `${match.words} ${verb} now.` : "Counting");

const Check = ({ value, onChange, label }) =>
  h(Flex, { as: "label", gap: 2, align: "center", fontSize: "sm" }, h("input", { type: "checkbox", checked: value, onChange: (event) => onChange(event.target.checked) }), label);

// Says what would happen, asks for confirmation, sends the request to Airflow's own API with the user's session, and follows the run.
function Send({ follow, dag, conf, problems, verb, says }) {
  const [confirming, setConfirming] = useState(false);
  const [state, setState] = useState({});
  const send = async () => {
    setState({ busy: true });
    try {
      const text = await request(`api/v2/dags/${encodeURIComponent(dag)}/dagRuns`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ logical_date: null, conf }),
      });
      follow(JSON.parse(text).dag_run_id);
    } catch (error) {
      setState({ error });
    }
    setConfirming(false);
  };
  return h(Box, { mt: 5 },
    state.error && h(Notice, { tone: "error", role: "alert", title: "Airflow refused the run" }, state.error.message),
    problems.length > 0 && h(Muted, { display: "block", mb: 2 }, problems.join(" ")),
    !confirming && h(Button, { disabled: problems.length > 0, onClick: () => setConfirming(true), colorPalette: "brand" }, `${verb} …`),
    confirming && h(Section, { title: "Check once more" }, says.filter(Boolean).map((sentence) => h(Text, { key: sentence, overflowWrap: "anywhere" }, sentence)),
      h(Text, { fontSize: "sm", mt: 2 }, "Starts a run of ", h(Code, null, dag), " under your name."),
      h(Box, { as: "details", fontSize: "sm", mb: 3 }, h(Box, { as: "summary", cursor: "pointer", color: "fg.muted", w: "fit-content" }, "The run's configuration"),
        h(Box, { as: "pre", fontSize: "xs", bg: "bg.muted", p: 3, borderRadius: "md", overflowX: "auto", my: 2 }, JSON.stringify(conf, null, 2))),
      h(Flex, { gap: 2 }, h(Button, { onClick: send, loading: state.busy, colorPalette: "brand", autoFocus: true }, verb),
        h(Button, { variant: "outline", onClick: () => setConfirming(false) }, "Back"))));
}
