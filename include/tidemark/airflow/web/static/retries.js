// Waiting and failed records.

import { A, Ago, Banners, Box, Button, Due, Empty, Flex, Fragment, Input, LinkButton, Loaded, Muted, Notice, Section, Select, Sized, State, Text,
  Title, api, counted, discardPath, duration, h, matches, number, query, redrivePath, to, useData, useEffect, useParam, useState } from "./base.js";
import { Bars } from "./chart.js";
import { Rows } from "./table.js";

export function RetriesEverywhere() {
  const state = useData(api("retries"));
  const [search, setSearch] = useParam("q");
  return h(Loaded, { state }, ({ consumers, banners }) => {
    const rows = consumers.filter((row) => matches(search, row.consumer, row.error_type, row.example));
    return h(Box, null, h(Banners, { banners }),
      consumers.length > 0 && h(Flex, { gap: 2, mb: 3, wrap: "wrap", align: "center" },
        h(Input, { size: "sm", maxW: "20rem", placeholder: "Search consumer or error", "aria-label": "Search retries", value: search, onChange: (event) => setSearch(event.target.value) }),
        h(Muted, null, `${number(rows.length)} of ${number(consumers.length)}`)),
      rows.length ? h(Rows, { label: "Retries", rows, id: (row) => row.consumer, columns: EVERYWHERE })
        : consumers.length ? h(Empty, { title: "Nothing matches" }, "Change the search.")
          : h(Empty, { title: "Nothing waits and nothing has failed" }, "Records that cannot be loaded appear here."));
  });
}

const count = (row, records) => `${number(records)}${row.more ? "+" : ""}`;

const EVERYWHERE = [
  { name: "Consumer", cell: (row) => h(A, { to: to("retries", row.consumer), fontWeight: "semibold" }, row.consumer) },
  { name: "Waiting", end: true, cell: (row) => count(row, row.waiting) },
  { name: "Held", end: true, cell: (row) => count(row, row.held) },
  { name: "Failed", end: true, cell: (row) => count(row, row.failed) },
  { name: "New", cell: (row) => h(Growth, { counts: row.growth }) },
  { name: "Most frequent error", cell: (row) => h(Box, { maxW: "30rem" }, h(Text, { fontWeight: "medium" }, row.error_type), h(Muted, null, row.example)) },
  { name: "Last", cell: (row) => h(Ago, { at: row.last }) },
];

// Whether records fail faster than before. counts: [{last_hour, hour_before}] of some error types.
function Growth({ counts }) {
  const now = counts.reduce((all, row) => all + row.last_hour, 0), before = counts.reduce((all, row) => all + row.hour_before, 0);
  if (!now && !before) return h(Muted, null, "none in 2 h");
  return h(Box, null, h(State, { value: now > before ? "growing" : now < before ? "slowing" : "steady" }),
    h(Muted, { display: "block" }, `${number(now)} first failed in the last hour, ${number(before)} in the hour before`));
}

export const Retries = ({ consumer }) => {
  const state = useData(api("groups", consumer, "retries"));
  return h(Box, null, h(Title, { text: `Retries of ${consumer}` }, h(A, { to: to("groups", consumer) }, "Group")),
    h(Loaded, { state }, (data) => h(View, { consumer, data })));
};

function View({ consumer, data }) {
  const total = data.counts.reduce((all, row) => all + row.records, 0);
  return h(Box, null,
    !total && h(Box, { mt: 4 }, h(Empty, { title: "Nothing waits and nothing has failed" }, "Records that cannot be loaded appear here.")),
    data.overdue && h(Notice, { title: `${counted(data.overdue.records, "record is", "records are")} due, the oldest for ${duration(data.overdue.oldest)}` },
      "The DAG ", h(A, { to: "/dags/drain_retries" }, "drain_retries"), " tries them again. If it does not start, check that it is not paused."),
    data.due.length > 0 && h(Section, { title: "Waiting", aside: h(Muted, null, data.late ? `tries of the last 24 hours: ${duration(data.late.median)} late (median), p99 ${duration(data.late.p99)}` : "") }, tiers(data)),
    data.counts.length > 0 && h(Section, { title: "By error" }, h(Rows, { label: "Errors", rows: data.counts, id: (row) => `${row.state}/${row.error_type}`, columns: errors(consumer, data) })),
    h(Records, { consumer, data }));
}

function tiers(data) {
  const names = new Map(data.tiers.map((tier) => [tier.topic, tier.tier]));
  const topics = [...new Set(data.due.map((row) => row.topic))];
  return topics.map((topic) => {
    const rows = data.due.filter((row) => row.topic === topic);
    const held = rows.filter((row) => row.state === "HELD").reduce((all, row) => all + row.records, 0);
    const waiting = rows.filter((row) => row.state === "WAITING");
    const bars = Array.from({ length: data.buckets + 1 }, (_, index) => ({
      label: index === 0 ? "due" : `in ${index * data.bucket_seconds / 60} min${index === data.buckets ? " or later" : ""}`,
      value: waiting.filter((row) => row.bucket === index).reduce((all, row) => all + row.records, 0),
    }));
    const first = waiting.map((row) => row.first).sort()[0], last = waiting.map((row) => row.last).sort().pop();
    return h(Box, { key: topic, mb: 4 }, h(Text, { fontWeight: "medium", fontSize: "sm" }, `${names.get(topic) ?? (topic || "held")}: ${number(waiting.reduce((all, row) => all + row.records, 0))} waiting`,
      held > 0 && `, ${number(held)} held behind an earlier record of their key`,
      waiting.length > 0 && h(Muted, null, waiting.every((row) => row.bucket === 0) ? ", all due" : h(Fragment, null, "; the first ", h(Due, { at: first }), ", the last ", h(Due, { at: last })))),
    waiting.length > 0 && h(Sized, { most: 620 }, (width) => h(Bars, { width, bars, label: `When the records of ${names.get(topic) ?? topic} come due` })));
  });
}

const errors = (consumer, data) => [
  { name: "Error", cell: (row) => h(Box, { minW: "7rem" }, h(A, { to: `${to("retries", consumer)}${query({ state: row.state, error: row.error_type })}`, fontWeight: "medium" }, row.error_type)) },
  { name: "State", cell: (row) => h(State, { value: row.state }) },
  { name: "Records", end: true, cell: (row) => number(row.records) },
  { name: "New", cell: (row) => h(Growth, { counts: data.growth.filter((growth) => growth.error_type === row.error_type) }) },
  { name: "Example", cell: (row) => h(Box, { maxW: "28rem" }, h(Muted, null, row.example, row.texts > 1 && ` (${counted(row.texts, "different text")})`)) },
  { name: "First", cell: (row) => h(Ago, { at: row.first }) },
  { name: "Last", cell: (row) => h(Ago, { at: row.last }) },
  { name: "Actions", cell: (row) => h(Flex, { gap: 3, wrap: "wrap" },
    data.forms.redrive && row.state === "FAILED" && h(A, { to: redrivePath(consumer, { error: row.error_type }) }, "Redrive …"),
    data.forms.discard && h(A, { to: discardPath(consumer, { error: row.error_type, state: row.state }) }, "Discard …")) },
];

function Records({ consumer, data }) {
  const [state, setState] = useParam("state");
  const [error, setError] = useParam("error");
  const [text, setText] = useParam("text");
  const [tier, setTier] = useParam("tier");
  const [after, setAfter] = useState(0);
  const [chosen, choose] = useState([]); // numbers of records
  useEffect(() => {
    setAfter(0);
    choose([]);
  }, [state, error, text, tier]);
  const page = useData(api("groups", consumer, "records") + query({ state, error, text, tier, after: after || "" }));
  const total = page.data?.total;
  const these = chosen.length ? `${number(chosen.length)} selected` : total === undefined ? "these" : `these ${number(total)}`;
  const filter = chosen.length ? { numbers: chosen.join(", ") } : { error, text, tier };
  const settled = ["LOADED", "SKIPPED", "DISCARDED"].includes(state);
  return h(Section, { title: "Records", aside: total !== undefined && h(Muted, null, counted(total, "record")) },
    h(Flex, { gap: 2, mb: 3, wrap: "wrap", align: "center" },
      h(Select, { label: "State", value: state, onChange: setState, options: [["", "Not settled"], ...["FAILED", "WAITING", "HELD", "LOADED", "SKIPPED", "DISCARDED"].map((name) => [name, name.toLowerCase()])] }),
      h(Select, { label: "Tier", value: tier, onChange: setTier, options: [["", "All tiers"], ...data.tiers.map((tier) => [tier.tier, tier.tier])] }),
      h(Input, { size: "sm", maxW: "14rem", "aria-label": "Error type", placeholder: "Error type", value: error, onChange: (event) => setError(event.target.value) }),
      h(Input, { size: "sm", maxW: "14rem", "aria-label": "Error text", placeholder: "Part of the error's text", value: text, onChange: (event) => setText(event.target.value) }),
      total !== 0 && data.forms.redrive && ["", "FAILED"].includes(state) && h(LinkButton, { to: redrivePath(consumer, filter) }, chosen.length ? `Redrive ${these} …` : "Redrive the failed ones …"),
      total !== 0 && data.forms.discard && !settled && h(LinkButton, { to: discardPath(consumer, chosen.length ? filter : { ...filter, state }) }, `Discard ${these} …`)),
    h(Loaded, { state: page }, ({ records, next }) => h(Box, null,
      records.length ? h(Rows, { label: "Records", rows: records, id: (row) => row.number, columns: [...(settled || !(data.forms.redrive || data.forms.discard) ? [] : [selection(chosen, choose)]), ...columns(consumer, data)] })
        : h(Empty, { title: "No record matches" }, "Change the filter."),
      h(Flex, { gap: 2, mt: 2 }, after > 0 && h(Button, { size: "sm", variant: "outline", onClick: () => setAfter(0) }, "First"),
        next && h(Button, { size: "sm", variant: "outline", onClick: () => setAfter(next) }, "Next")))));
}

// A box to select a record for a redrive or a discard.
const selection = (chosen, choose) => ({ name: "", cell: (row) => h("input", { type: "checkbox", "aria-label": `Select record ${row.number}`, checked: chosen.includes(row.number),
  onChange: (event) => choose(event.target.checked ? [...chosen, row.number] : chosen.filter((number) => number !== row.number)) }) });

const columns = (consumer, data) => [
  { name: "Record", cell: (row) => data.payloads ? h(A, { to: to("retries", consumer, row.number), fontWeight: "semibold" }, row.number) : row.number },
  { name: "State", cell: (row) => h(State, { value: row.state, title: row.publish_error ?? undefined }) },
  { name: "Read from", cell: (row) => `${row.topic}/${row.partition}@${row.offset}` },
  { name: "Error", cell: (row) => h(Box, { maxW: "30rem" }, h(Text, { fontWeight: "medium" }, row.error_type), h(Muted, { overflowWrap: "anywhere" }, row.error_text)) },
  { name: "Failed tries", end: true, cell: (row) => number(row.failures) },
  { name: "Next try", cell: (row) => row.due_at && h(Due, { at: row.due_at }) },
  { name: "Bytes", end: true, cell: (row) => number(row.value_bytes) },
  { name: "First failed", cell: (row) => h(Ago, { at: row.created_at }) },
];
