// Verdicts over time, and a single verdict with its failing rows.

import { A, Ago, Banners, Box, Code, ConsumerPicker, Empty, Facts, Flex, Folded, Loaded, Muted, NewestOnly, RunLink, Section, Select, State, Text, Title, api, counted,
  duration, h, moment, number, query, to, useData, useParam } from "./base.js";
import { Strip } from "./chart.js";
import { Rows } from "./table.js";

export function Validations() {
  const [consumer, setConsumer] = useParam("consumer");
  const [only, setOnly] = useParam("verdict");
  const state = useData(api("validations") + query({ consumer, verdict: only }));
  return h(Box, null,
    h(Flex, { gap: 2, mb: 3, wrap: "wrap" }, h(ConsumerPicker, { value: consumer, onChange: setConsumer }),
      h(Select, { label: "Verdict", value: only, onChange: setOnly, options: [["", "All verdicts"], ...["critical", "warning", "passed"].map((verdict) => [verdict, verdict])] })),
    h(Loaded, { state }, (data) => {
      const rows = data.validations;
      return h(Box, null, h(Banners, { banners: data.banners }),
        rows.length > 0 && !only && h(Strip, { verdicts: [...rows].reverse().slice(-60) }),
        rows.length > 0 && h(Legend, { marks: !only }),
        rows.length ? h(Box, null, table(rows.filter(judged), "Validations"), rows.some((row) => !judged(row)) && h(Folded, { title: "Runs without rows", aside: counted(rows.filter((row) => !judged(row)).length, "validation") },
          table(rows.filter((row) => !judged(row)), "Validations of runs without rows")))
          : only ? h(Empty, { title: `No validation is ${only}` }) : h(Empty, { title: "No validation" }, "Each run of a consumer ends with one: the conservation check, and its suite if it has one."),
      rows.length >= data.limit && h(NewestOnly, { consumer }));
    }));
}

// Whether it has judged rows, or found something nevertheless.
const judged = (row) => row.sink_rows > 0 || row.deleted > 0 || row.verdict !== "passed";

const table = (rows, label) => rows.length > 0 && h(Rows, { label, rows, id: (row) => `${row.consumer}/${row.validation_id}`, columns: COLUMNS });

const MEANINGS = [["passed", "all expectations hold"], ["warning", "some do not, and the validated view shows the rows"], ["critical", "the validated view stops before the rows"]];

const Legend = ({ marks }) => h(Flex, { gap: 4, wrap: "wrap", mb: 3, fontSize: "sm" }, MEANINGS.map(([verdict, meaning]) =>
  h(Box, { key: verdict }, h(State, { value: verdict }), h(Muted, null, ` ${meaning}`))), marks && h(Muted, null, "One mark each, oldest left."));

const COLUMNS = [
  { name: "Consumer", cell: (row) => h(A, { to: to("groups", row.consumer), fontWeight: "semibold" }, row.consumer) },
  { name: "Verdict", cell: (row) => h(A, { to: to("validations", row.consumer, row.validation_id), "aria-label": `Validation ${row.validation_id}: ${row.verdict}` }, h(State, { value: row.verdict })) },
  { name: "When", cell: (row) => h(Ago, { at: row.validated_at }) },
  { name: "Suite", cell: (row) => row.suite ?? "conservation check" },
  { name: "Failing", end: true, cell: (row) => number(row.failing) },
  { name: "Rows", end: true, cell: (row) => h(Box, null, number(row.sink_rows), row.deleted > 0 && h(Muted, { display: "block" }, counted(row.deleted, "delete"))) },
  { name: "Took", end: true, cell: (row) => duration(row.seconds) },
  { name: "DAG run", cell: (row) => h(RunLink, { row }) },
];

export const Validation = ({ consumer, id }) => {
  const state = useData(api("groups", consumer, "validations", id));
  return h(Loaded, { state }, (data) => h(View, { consumer, data }));
};

function View({ consumer, data }) {
  const failing = data.results.filter((result) => !result.success);
  const good = data.results.filter((result) => result.success);
  return h(Box, null,
    h(Title, { text: `Validation ${data.validation_id} of ${consumer}` }, h(State, { value: data.verdict }), h(A, { to: `${to("validations")}${query({ consumer })}` }, "Validations"), h(A, { to: to("groups", consumer) }, "Group")),
    h(Facts, { rows: [["When", moment(data.validated_at)], ["Suite", data.suite ?? "conservation check"],
      ["Rows", number(data.sink_rows)], data.deleted > 0 && ["Deletes", number(data.deleted)], ["Took", duration(data.seconds)], data.run_id && ["DAG run", h(RunLink, { row: data })]] }),
    h(Section, { title: "Failing", aside: h(Muted, null, counted(failing.length, "expectation")) },
      failing.length ? failing.map((result) => h(Result, { key: result.number, result, data })) : h(Empty, { title: "All expectations passed" })),
    good.length > 0 && h(Section, { title: "Passed" }, good.map((result) => h(Box, { key: result.number, fontSize: "sm" }, "✓ ", h(Code, null, result.expectation), " ", h(Muted, null, argumentText(result.arguments))))));
}

const argumentText = (values) => Object.entries(values ?? {}).filter(([, value]) => value !== null).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");

const Result = ({ result, data }) =>
  h(Box, { borderWidth: "1px", borderRadius: "md", p: 3, mb: 3, overflowWrap: "anywhere" },
    h(Flex, { gap: 2, align: "center", wrap: "wrap" }, h(State, { value: result.severity }), h(Code, null, result.expectation)),
    h(Text, { fontSize: "sm" }, result.text ?? argumentText(result.arguments)),
    result.rows.length > 0 && h(Box, { mt: 2 }, h(Text, { fontSize: "sm", fontWeight: "medium" }, "Failing rows, by source record"),
      h(Rows, { label: `Failing rows of ${result.expectation}`, rows: result.rows, id: (row) => `${row.topic}/${row.partition}@${row.offset}/${row.seq}`, columns: FAILING }),
      result.not_stored > 0 && h(Muted, null, `${number(result.not_stored)} more were not stored.`)),
    result.observed ? h(Box, { as: "details", mt: 2, fontSize: "sm" }, h(Box, { as: "summary", cursor: "pointer", color: "fg.info" }, "Observed values"),
      h(Box, { as: "pre", tabIndex: 0, fontSize: "xs", overflow: "auto", maxH: "20rem", bg: "bg.muted", p: 2 }, JSON.stringify(result.observed, null, 2)))
      : !data.payloads && h(Muted, { display: "block", mt: 2 }, "Observed values quote rows: they are shown to users who may edit the consumer's DAG."));

const FAILING = [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "Offset", end: true, cell: (row) => number(row.offset) },
  { name: "Row of the record", end: true, cell: (row) => number(row.seq) },
];
