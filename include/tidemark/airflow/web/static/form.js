// The forms that ask Airflow for a run of `rewind` or `redrive`, as the user who is signed in. The run makes a plan and checks everything.

import { A, Box, Button, Code, Field, Flex, Heading, Input, Loaded, Muted, Notice, Section, Select, Text, Textarea, api, h, request, to, useData, useParam,
  useState } from "./base.js";
import { Preview, usePreview } from "./preview.js";

export const RewindForm = ({ consumer }) => {
  const state = useData(api("groups", consumer, "form"), { refresh: false });
  return h(Box, null, h(Heading, { as: "h1", size: "xl" }, `Rewind ${consumer}`), h(Loaded, { state }, (data) => h(Rewind, { consumer, data })));
};

function Rewind({ consumer, data }) {
  const [scenario, setScenario] = useParam("scenario", "to-validated");
  const [value, setValue] = useParam("value");
  const [scope, setScope] = useParam("scope", "all");
  const [reason, setReason] = useState("");
  const [loss, setLoss] = useState(false);
  const [consume, setConsume] = useState(true);
  const offered = data.scenarios.filter((one) => one.name !== "from-file");
  const word = offered.find((one) => one.name === scenario) ?? offered[0];
  const complete = data.forms.rewind && (!word.value || value.trim());
  const preview = usePreview(consumer, complete && { scenario: word.name, value: word.value ? value.trim() : "", scope, allow_loss: loss });
  if (!data.forms.rewind) return h(Forbidden, { dag: data.own ? `rewind__${consumer}` : "rewind" });
  const problems = [
    word.value && !value.trim() && `${word.name} needs ${word.value}, for example ${word.example}.`,
    reason.trim().length < data.reason_characters && `Give a reason of at least ${data.reason_characters} characters.`,
  ].filter(Boolean);
  const consumers = preview.data?.consumers ?? [consumer]; // a rewind of several is undone with all of them
  const conf = { ...(data.own ? {} : { consumers }), scope, scenario: word.name, ...(word.value ? { value: value.trim() } : {}),
    reason: reason.trim(), allow_loss: loss, consume };
  return h(Box, { maxW: "64rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Makes a plan first: offsets, rows and failed records of each partition. ",
      data.approval === "required" ? "Nothing changes before somebody approves it in the DAG run." : "This consumer needs no approval: the plan is applied at once."),
    h(Flex, { direction: "column", gap: 4, mt: 4, maxW: "44rem" },
      h(Field, { label: "Where to", hint: word.does }, h(Select, { label: "Scenario", value: word.name, onChange: setScenario, w: "100%", options: offered.map((one) => [one.name, one.name]) })),
      word.value && h(Field, { label: `Value: ${word.value}`, hint: `Example: ${word.example}${word.name === "to-datetime" ? ", in UTC as 2026-03-29 14:00Z" : ""}` },
        h(Input, { size: "sm", name: "value", value, onChange: (event) => setValue(event.target.value) })),
      h(Field, { label: "Topics and partitions", hint: "all, flights, or flights:0,1,5-9" },
        h(Input, { size: "sm", name: "scope", value: scope, onChange: (event) => setScope(event.target.value) })),
      h(Field, { label: "Reason", hint: "Kept permanently, with your name." },
        h(Textarea, { size: "sm", name: "reason", rows: 2, value: reason, onChange: (event) => setReason(event.target.value) })),
      h(Check, { value: loss, onChange: setLoss, label: "Allow loss: if Kafka no longer has the records, record the gap as lost" }),
      h(Check, { value: consume, onChange: setConsume, label: "Start a run of the consumer afterwards" })),
    h(Preview, { preview, complete, consumer }),
    h(Send, { dag: data.forms.rewind, conf, problems, verb: "Request the rewind", says: `Rewind ${consumers.join(", ")}, ${scope === "all" ? "all partitions" : scope}, ${word.name}${word.value ? ` ${value}` : ""}. Rows that were made from there on leave ${data.table}.` }));
}

export const RedriveForm = ({ consumer }) => {
  const state = useData(api("groups", consumer, "form"), { refresh: false });
  return h(Box, null, h(Heading, { as: "h1", size: "xl" }, `Redrive records of ${consumer}`), h(Loaded, { state }, (data) => h(Redrive, { consumer, data })));
};

function Redrive({ consumer, data }) {
  const [error, setError] = useParam("error");
  const [text, setText] = useParam("text");
  const [numbers, setNumbers] = useParam("numbers");
  const [tier, setTier] = useParam("tier");
  const [where, setWhere] = useParam("to", "ladder");
  const [then, setThen] = useState("ask");
  const [reason, setReason] = useState("");
  if (!data.forms.redrive) return h(Forbidden, { dag: data.own ? `redrive__${consumer}` : "redrive" });
  const given = { error, text, numbers, tier };
  const conf = { ...(data.own ? {} : { consumer }), ...Object.fromEntries(Object.entries(given).filter(([, value]) => value.trim())), to: where, then, reason: reason.trim() };
  const problems = reason.trim().length < data.reason_characters ? [`Give a reason of at least ${data.reason_characters} characters.`] : [];
  const input = (name, value, set) => h(Input, { size: "sm", name, value, onChange: (event) => set(event.target.value) });
  return h(Box, { maxW: "44rem" },
    h(Text, { color: "fg.muted", mt: 1 }, "Sends failed records through the retry topics again. A record must match every filter."),
    h(Flex, { direction: "column", gap: 4, mt: 4 },
      h(Field, { label: "Error type" }, input("error", error, setError)), h(Field, { label: "Error text", hint: "Any part of it." }, input("text", text, setText)),
      h(Field, { label: "Record numbers", hint: "Separated by commas." }, input("numbers", numbers, setNumbers)),
      h(Field, { label: "Tier", hint: "A delay such as 5m, or failed." }, input("tier", tier, setTier)),
      h(Field, { label: "Where to" }, h(Select, { label: "Where to", value: where, onChange: setWhere, options: [["ladder", "ladder: all delays again"], ["now", "now: one try, at once"]] })),
      h(Field, { label: "After the plan" }, h(Select, { label: "After the plan", value: then, onChange: setThen,
        options: [["ask", "ask for approval first"], ["apply", "redrive the records"], ["nothing", "nothing (dry run)"]] })),
      h(Field, { label: "Reason", hint: "Kept permanently, with your name." },
        h(Textarea, { size: "sm", name: "reason", rows: 2, value: reason, onChange: (event) => setReason(event.target.value) }))),
    h(Send, { dag: data.forms.redrive, conf, problems, verb: "Request the redrive",
      says: `Redrive ${Object.values(given).some((one) => one.trim()) ? "the matching failed records" : "all failed records"} of ${consumer}.` }));
}

const Forbidden = ({ dag }) => h(Notice, { tone: "warning", role: "alert", title: "Your roles do not allow this" }, `It takes the right to start the DAG ${dag}. Ask an administrator.`);

const Check = ({ value, onChange, label }) =>
  h(Flex, { as: "label", gap: 2, align: "center", fontSize: "sm" }, h("input", { type: "checkbox", checked: value, onChange: (event) => onChange(event.target.checked) }), label);

// Shows what will be sent, asks once more, sends it to Airflow's own API with the user's session.
function Send({ dag, conf, problems, verb, says }) {
  const [asked, setAsked] = useState(false);
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
    setAsked(false);
  };
  if (state.run) {
    const path = `/dags/${encodeURIComponent(dag)}/runs/${encodeURIComponent(state.run.dag_run_id)}`;
    return h(Notice, { tone: "success", title: "Requested" }, h(Text, null, "Airflow plans it as ", h(A, { to: path }, state.run.dag_run_id), ". The plan, and the question whether to apply it, are there."));
  }
  return h(Box, { mt: 5 },
    state.error && h(Notice, { tone: "error", role: "alert", title: "Airflow refused the run" }, state.error.message),
    problems.length > 0 && h(Muted, { display: "block", mb: 2 }, problems.join(" ")),
    !asked && h(Button, { disabled: problems.length > 0, onClick: () => setAsked(true), colorPalette: "brand" }, `${verb} …`),
    asked && h(Section, { title: "Check once more" }, h(Text, null, says),
      h(Box, { as: "pre", fontSize: "xs", bg: "bg.muted", p: 3, borderRadius: "md", overflowX: "auto", my: 2 }, JSON.stringify(conf, null, 2)),
      h(Text, { fontSize: "sm", mb: 3 }, "Starts a run of ", h(Code, null, dag), " under your name."),
      h(Flex, { gap: 2 }, h(Button, { onClick: send, loading: state.busy, colorPalette: "brand", autoFocus: true }, verb),
        h(Button, { variant: "outline", onClick: () => setAsked(false) }, "Back"))));
}

export const redrivePath = (consumer, filter) => {
  const made = new URLSearchParams(Object.entries(filter).filter(([, value]) => value));
  return `${to("groups", consumer, "redrive")}${made.size ? `?${made}` : ""}`;
};
