// The forms that ask Airflow for a run of `rewind`, `redrive` or `discard`, as the user who is signed in. The run makes a plan and checks everything.

import { Box, Button, Code, Field, Flex, Input, Loaded, Muted, Notice, RunLink, Section, Select, Text, Textarea, Title, api, h, request, useData,
  useParam, useState } from "./base.js";
import { Preview, usePreview } from "./preview.js";

// The form of the DAG `kind`.
export function Form({ kind, consumer }) {
  const state = useData(api("groups", consumer, "form"), { refresh: false });
  const [title, View] = { rewind: ["Rewind", Rewind], redrive: ["Redrive records of", Redrive], discard: ["Discard records of", Discard] }[kind];
  return h(Box, null, h(Title, { text: `${title} ${consumer}` }), h(Loaded, { state }, (data) => data.forms[kind] ? h(View, { consumer, data })
    : h(Notice, { tone: "warning", role: "alert", title: "Your roles do not allow this" },
      `You need the permission to start the DAG ${data.own ? `${kind}__${consumer}` : kind}. Ask an administrator.`)));
}

function Rewind({ consumer, data }) {
  const [scenario, setScenario] = useParam("scenario", "to-validated");
  const [value, setValue] = useParam("value");
  const [scope, setScope] = useParam("scope", "all");
  const [reason, setReason] = useState("");
  const [loss, setLoss] = useState(false);
  const [consume, setConsume] = useState(true);
  const choices = data.scenarios.filter((choice) => choice.name !== "from-file");
  const chosen = choices.find((choice) => choice.name === scenario) ?? choices[0];
  const complete = !chosen.value || Boolean(value.trim());
  const preview = usePreview(consumer, complete && { scenario: chosen.name, value: chosen.value ? value.trim() : "", scope, allow_loss: loss });
  const problems = [
    chosen.value && !value.trim() && `${chosen.name} needs ${chosen.value}, for example ${chosen.example}.`,
    unreasoned(data, reason),
  ].filter(Boolean);
  const consumers = preview.data?.consumers ?? [consumer]; // an undo moves all consumers of the rewind
  const conf = { ...(data.own ? {} : { consumers }), scope, scenario: chosen.name, ...(chosen.value ? { value: value.trim() } : {}),
    reason: reason.trim(), allow_loss: loss, consume };
  return h(Box, { maxW: "64rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Makes a plan first, with the offsets, rows and failed records of each partition. ",
      data.approval === "required" ? "Nothing changes before somebody approves it in the DAG run." : "This consumer needs no approval: the plan is applied at once."),
    h(Flex, { direction: "column", gap: 4, mt: 4, maxW: "44rem" },
      h(Field, { label: "Where to", hint: chosen.does }, h(Select, { label: "Scenario", value: chosen.name, onChange: setScenario, w: "100%", options: choices.map((choice) => [choice.name, choice.name]) })),
      chosen.value && h(Field, { label: `Value: ${chosen.value}`, hint: `Example: ${chosen.example}${chosen.name === "to-datetime" ? "; for UTC, add Z: 2026-03-29 14:00Z" : ""}` },
        h(Input, { size: "sm", name: "value", value, onChange: (event) => setValue(event.target.value) })),
      h(Field, { label: "Topics and partitions", hint: "all, flights, or flights:0,1,5-9" },
        h(Input, { size: "sm", name: "scope", value: scope, onChange: (event) => setScope(event.target.value) })),
      h(Reason, { value: reason, onChange: setReason }),
      h(Check, { value: loss, onChange: setLoss, label: "Allow loss: if Kafka no longer has the records, record the gap as lost" }),
      h(Check, { value: consume, onChange: setConsume, label: "Start a run of the consumer afterwards" })),
    h(Preview, { preview, complete }),
    h(Send, { dag: data.forms.rewind, conf, problems, verb: "Request the rewind", says: `Rewind ${consumers.join(", ")}, ${scope === "all" ? "all partitions" : scope}, ${chosen.name}${chosen.value ? ` ${value}` : ""}. Rows loaded from there on are taken out of ${data.table}.` }));
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

function Redrive({ consumer, data }) {
  const [filter, fields] = useRecords();
  const [where, setWhere] = useParam("to", "ladder");
  const [then, setThen] = useState("ask");
  const [reason, setReason] = useState("");
  const conf = { ...(data.own ? {} : { consumer }), ...filter, to: where, then, reason: reason.trim() };
  return h(Box, { maxW: "44rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Sends failed records through the retry topics again. A record must match every filter."),
    h(Flex, { direction: "column", gap: 4, mt: 4 }, fields,
      h(Field, { label: "Where to" }, h(Select, { label: "Where to", value: where, onChange: setWhere, options: [["ladder", "ladder: all delays again"], ["now", "now: one try, at once"]] })),
      h(Then, { value: then, onChange: setThen, verb: "redrive" }), h(Reason, { value: reason, onChange: setReason })),
    h(Send, { dag: data.forms.redrive, conf, problems: [unreasoned(data, reason)].filter(Boolean), verb: "Request the redrive",
      says: `Redrive ${Object.keys(filter).length ? "the matching failed records" : "all failed records"} of ${consumer}.` }));
}

function Discard({ consumer, data }) {
  const [filter, fields] = useRecords();
  const [state, setState] = useParam("state");
  const [then, setThen] = useState("ask");
  const [reason, setReason] = useState("");
  const chosen = { ...filter, ...(state ? { states: [state] } : {}) };
  const conf = { ...(data.own ? {} : { consumer }), ...chosen, then, reason: reason.trim() };
  const problems = [!Object.keys(chosen).length && "Choose records: a state or another filter.", unreasoned(data, reason)].filter(Boolean);
  return h(Box, { maxW: "44rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Settles records without loading them: they are never tried again, unless somebody redrives them. A record must match every filter."),
    h(Flex, { direction: "column", gap: 4, mt: 4 },
      h(Field, { label: "State" }, h(Select, { label: "State", value: state, onChange: setState,
        options: [["", "waiting, held or failed"], ["FAILED", "failed"], ["WAITING", "waiting"], ["HELD", "held"]] })),
      fields, h(Then, { value: then, onChange: setThen, verb: "discard" }), h(Reason, { value: reason, onChange: setReason })),
    h(Send, { dag: data.forms.discard, conf, problems, verb: "Request the discard",
      says: `Discard the matching ${state ? state.toLowerCase() : "waiting, held and failed"} records of ${consumer}.` }));
}

const Check = ({ value, onChange, label }) =>
  h(Flex, { as: "label", gap: 2, align: "center", fontSize: "sm" }, h("input", { type: "checkbox", checked: value, onChange: (event) => onChange(event.target.checked) }), label);

// Shows the request, asks for confirmation, and sends it to Airflow's own API with the user's session.
function Send({ dag, conf, problems, verb, says }) {
  const [confirming, setConfirming] = useState(false);
  const [state, setState] = useState({});
  const send = async () => {
    setState({ busy: true });
    try {
      const text = await request(`api/v2/dags/${encodeURIComponent(dag)}/dagRuns`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ logical_date: null, conf }),
      });
      setState({ run: JSON.parse(text) });
    } catch (error) {
      setState({ error });
    }
    setConfirming(false);
  };
  if (state.run) {
    return h(Notice, { tone: "success", title: "Requested" }, h(Text, null, "Airflow plans it as ", h(RunLink, { row: { dag_id: dag, run_id: state.run.dag_run_id } }), ". The run shows the plan and, if required, asks for approval."));
  }
  return h(Box, { mt: 5 },
    state.error && h(Notice, { tone: "error", role: "alert", title: "Airflow refused the run" }, state.error.message),
    problems.length > 0 && h(Muted, { display: "block", mb: 2 }, problems.join(" ")),
    !confirming && h(Button, { disabled: problems.length > 0, onClick: () => setConfirming(true), colorPalette: "brand" }, `${verb} …`),
    confirming && h(Section, { title: "Check once more" }, h(Text, null, says),
      h(Box, { as: "pre", fontSize: "xs", bg: "bg.muted", p: 3, borderRadius: "md", overflowX: "auto", my: 2 }, JSON.stringify(conf, null, 2)),
      h(Text, { fontSize: "sm", mb: 3 }, "Starts a run of ", h(Code, null, dag), " under your name."),
      h(Flex, { gap: 2 }, h(Button, { onClick: send, loading: state.busy, colorPalette: "brand", autoFocus: true }, verb),
        h(Button, { variant: "outline", onClick: () => setConfirming(false) }, "Back"))));
}
