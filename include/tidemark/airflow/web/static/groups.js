// All consumers, worst first.

import { A, Ago, Badge, Banners, Box, Due, Empty, Flex, Input, Loaded, Muted, RunLink, Select, State, Text, api, atMost, coded, duration, h, matches, number, to, useData,
  useParam } from "./base.js";
import { Sparkline } from "./chart.js";
import { Rows } from "./table.js";

export function Groups() {
  const state = useData(api("groups"));
  const { data: answer } = useData(api("trends"));
  const [search, setSearch] = useParam("q");
  const [only, setOnly] = useParam("state");
  return h(Loaded, { state }, (data) => h(View, { data, trends: answer?.trends ?? {}, search, setSearch, only, setOnly }));
}

function View({ data, trends, search, setSearch, only, setOnly }) {
  const shown = data.groups.filter((row) => (!only || row.health === only) && matches(search, row.consumer, row.group, row.table, row.owner, ...row.tags, ...row.topics));
  const states = [...new Set(data.groups.map((row) => row.health))];
  if (!data.groups.length && !data.banners.length) {
    return h(Empty, { title: "No consumer is visible to you" }, "Add a file to include/consumers, or ask for the right to see a consumer's DAG.");
  }
  return h(Box, null,
    h(Banners, { banners: data.banners }),
    h(Flex, { gap: 2, mb: 3, wrap: "wrap", align: "center" },
      h(Input, { size: "sm", maxW: "20rem", placeholder: "Search name, topic, table, owner, tag", "aria-label": "Search groups", value: search,
        onChange: (event) => setSearch(event.target.value) }),
      h(Select, { label: "Filter by health", value: only, onChange: setOnly, options: [["", "All"], ...states.map((state) => [state, `${state} (${number(data.groups.filter((row) => row.health === state).length)})`])] }),
      h(Muted, null, `${number(shown.length)} of ${number(data.groups.length)}`)),
    shown.length ? h(Rows, { label: "Groups", rows: shown, id: (row) => row.consumer, columns: columns(data.most, trends), details: problems })
      : h(Empty, { title: "Nothing matches" }, "Change the search or the filter."));
}

const columns = (most, trends) => [
  { name: "Consumer", cell: (row) => h(Box, null, h(A, { to: to("groups", row.consumer), fontWeight: "semibold" }, row.consumer),
    h(Muted, { display: "block" }, row.topics.slice(0, 3).join(", "), row.topics.length > 3 && ` +${row.topics.length - 3}`, " → ", row.table)) },
  { name: "Health", cell: (row) => h(Box, { maxW: "22rem" }, h(State, { value: row.health }), h(Muted, { display: "block" }, row.why), row.fix && h(Text, { fontSize: "sm" }, coded(row.fix))) },
  { name: "Lag", end: true, cell: (row) => h(LagCell, { row, trend: trends[row.consumer] }) },
  { name: "Last commit", cell: (row) => h(Ago, { at: row.committed_at }) },
  { name: "Waiting", end: true, cell: (row) => count(row, row.waiting, most, "WAITING") },
  { name: "Failed", end: true, cell: (row) => count(row, row.failed, most, "FAILED") },
  { name: "Last run", cell: (row) => row.attempt_id ? h(Box, null, h(RunLink, { row }, row.attempt_state), " ", h(Muted, null, h(Ago, { at: row.ended_at ?? row.started_at }))) : "–" },
  { name: "Validation", cell: (row) => row.validation_id
    ? h(Box, null, h(A, { to: to("validations", row.consumer, row.validation_id), "aria-label": `Validation: ${row.verdict}` }, h(State, { value: row.verdict })))
    : "–" },
  { name: "Next run", cell: (row) => row.dag?.is_paused ? h(A, { to: `/dags/${row.dag_id}` }, "DAG paused") : h(Due, { at: row.dag?.next_run }) },
  { name: "Owner", cell: (row) => h(Box, null, row.owner, row.tags.map((tag) => h(Badge, { key: tag, ml: 1, variant: "outline" }, tag))) },
];

// Records and time behind, as of the last sample, its age, and the last hours as a line.
const LagCell = ({ row, trend }) => row.lag
  ? h(Box, null,
    h(Text, { as: "span" }, row.lag.records === null ? (row.lag.known_records ? `≥ ${number(row.lag.known_records)}` : "unknown") : number(row.lag.records)),
    h(Muted, { display: "block" }, row.lag.seconds === null ? "time unknown" : duration(row.lag.seconds)),
    h(Muted, { display: "block", fontSize: "xs", whiteSpace: "nowrap" }, "sampled ", h(Ago, { at: row.lag.sampled_at })), trend && h(Sparkline, { values: trend }))
  : "–";

const count = (row, value, most, state) => value
  ? h(A, { to: `${to("retries", row.consumer)}?state=${state}` }, atMost(value, most)) : number(value);

const problems = (row) => row.problems.length > 0 && h(Box, { as: "ul", fontSize: "sm", ps: 4, listStyleType: "disc" },
  row.problems.map((problem) => h("li", { key: problem.at + problem.message }, h(Text, { as: "span", fontFamily: "mono" }, problem.at), ` ${problem.message}`, problem.fix && `: ${problem.fix}`)));
