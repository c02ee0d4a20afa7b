// The list of rewinds, and a single rewind.

import { A, Ago, Banners, Box, Button, ConsumerPicker, Empty, Facts, Flex, LinkButton, Loaded, Muted, NewestOnly, Notice, RunLink, Section, Select, State, Text,
  Title, api, counted, h, moment, number, query, rewindPath, to, useData, useParam, useState, zoned } from "./base.js";
import { Beside } from "./beside.js";
import { Rows } from "./table.js";

const STATES = ["PLANNED", "BESIDE", "APPLIED", "UNDONE", "REJECTED", "DISCARDED", "EXPIRED"];
const shown = (state) => state === "BESIDE" ? "READ BESIDE" : state;
const stateOf = (row) => (row.state === "PLANNED" && (row.expired ?? Date.parse(row.expires_at) < Date.now()) ? "EXPIRED" : shown(row.state));

export function Rewinds() {
  const [consumer, setConsumer] = useParam("consumer");
  const [only, setOnly] = useParam("state");
  const state = useData(api("rewinds") + query({ consumer, state: only }));
  return h(Box, null,
    h(Flex, { gap: 2, mb: 3, wrap: "wrap", align: "center" }, h(ConsumerPicker, { value: consumer, onChange: setConsumer }),
      h(Select, { label: "Filter by state", value: only, onChange: setOnly,
        options: [["", "All states"], ...STATES.map((name) => [name, shown(name).toLowerCase()])] }),
      consumer && h(LinkButton, { to: rewindPath(consumer) }, "New rewind …")),
    h(Loaded, { state }, (data) => h(Box, null, h(Banners, { banners: data.banners }), data.rewinds.length
      ? h(Rows, { label: "Rewinds", rows: data.rewinds, id: (row) => `${row.consumers[0]}/${row.rewind_id}`, columns: COLUMNS })
      : only ? h(Empty, { title: `No rewind is ${shown(only).toLowerCase()}` }) : h(Empty, { title: "No rewind" }, "Open a group and choose Rewind to read records again."),
    data.rewinds.length >= data.limit && h(NewestOnly, { consumer }))));
}

const COLUMNS = [
  { name: "Rewind", cell: (row) => h(Box, null, h(A, { to: to("rewinds", row.consumers[0], row.rewind_id), fontWeight: "semibold" }, `Rewind ${row.rewind_id}`), " ", h(State, { value: stateOf(row) })) },
  { name: "What", cell: (row) => h(Box, { maxW: "26rem" }, zoned(row.says), h(Muted, { display: "block" }, row.reason)) },
  { name: "Consumers", cell: (row) => h(Box, null, row.consumers.map((name) => h(Box, { key: name }, h(A, { to: to("groups", name) }, name))), row.hidden > 0 && h(Muted, null, `and ${row.hidden} more`)) },
  { name: "Read again", end: true, cell: (row) => number(row.replay) },
  { name: "Rows out", end: true, cell: (row) => number(row.sink_rows) },
  { name: "Requested by", cell: (row) => h(Box, null, row.planned_by, " ", h(Muted, null, h(Ago, { at: row.planned_at }))) },
  { name: "Decided by", cell: (row) => row.decided_by },
  { name: "Applied by", cell: (row) => row.applied_by && h(Box, null, row.applied_by, " ", h(Muted, null, h(Ago, { at: row.applied_at }))) },
];

export const Rewind = ({ consumer, id }) => {
  const state = useData(api("groups", consumer, "rewinds", id));
  return h(Loaded, { state }, (data) => h(View, { consumer, data }));
};

function View({ consumer, data }) {
  const state = stateOf(data);
  return h(Box, null,
    h(Title, { text: `Rewind ${data.rewind_id} of ${consumer}` }, h(State, { value: state }), h(A, { to: `${to("rewinds")}${query({ consumer })}` }, "Rewinds"), h(A, { to: to("groups", consumer) }, "Group"),
      state === "APPLIED" && data.forms.rewind && h(LinkButton, { to: rewindPath(consumer, "undo", data.rewind_id) }, "Undo …")),
    h(Text, { mt: 1 }, zoned(data.says)),
    state === "PLANNED" && h(Notice, { tone: "info", title: data.beside ? "Not begun yet" : "Not applied yet" }, data.run_id
      ? h(Box, null, data.beside ? "Its DAG run begins it: " : "Review the plan and approve it in its DAG run: ", h(RunLink, { row: data })) : `${data.beside ? "Begin" : "Apply"} it with: tidemark rewind apply ${data.rewind_id}`),
    data.replay_beside && h(Beside, { replay: data.replay_beside }),
    state === "READ BESIDE" && h(Verified, { consumer, id: data.rewind_id, beside: true }),
    state === "DISCARDED" && h(Notice, { tone: "info", title: "The replay was discarded; no row was changed" }, h(A, { to: `${to("audit")}${query({ consumer, kind: "REWIND" })}` }, "The audit log says who discarded it, and why.")),
    state === "EXPIRED" && h(Notice, { tone: "warning", title: "The plan has expired; nothing was changed" }, "Make a new one."),
    data.undo_of && h(Notice, { tone: "info", title: `This rewind undoes rewind ${data.undo_of}` }, h(A, { to: to("rewinds", consumer, data.undo_of) }, `Rewind ${data.undo_of}`)),
    h(Section, { title: "Who and why" }, h(Facts, { rows: [
      ["Reason", data.reason], ["Requested by", `${data.planned_by}, ${moment(data.planned_at)}`],
      data.decided_by && [state === "REJECTED" ? "Rejected by" : "Approved by", `${data.decided_by}, ${moment(data.decided_at)}`],
      data.started_by && ["Begun by", `${data.started_by}, ${moment(data.started_at)}`],
      data.applied_by && [data.beside ? "Swapped by" : "Applied by", `${data.applied_by}, ${moment(data.applied_at)}`],
      state === "PLANNED" && ["Can be applied until", moment(data.expires_at)],
      data.run_id && ["DAG run", h(RunLink, { row: data })], ["Plan's digest", data.digest],
      data.allow_loss && ["Loss", "Records that Kafka no longer has are given up and recorded as lost."],
    ] })),
    data.hidden > 0 && h(Notice, { tone: "info", title: `${counted(data.hidden, "consumer")} more in this rewind` }, "Your roles do not allow you to see them."),
    data.groups.map((group) => h(Section, { key: group.consumer, title: group.consumer, aside: h(Muted, null,
      `${counted(group.partitions.reduce((sum, partition) => sum + partition.sink_rows, 0), "row")} out of ${group.table}, ` +
      counted(group.partitions.reduce((sum, partition) => sum + partition.failed_records, 0), "failed record")) },
    group.announced_assets.length > 0 && h(Notice, { tone: "warning", title: "Downstream DAGs have already been notified about these rows" }, `Assets: ${group.announced_assets.join(", ")}`),
    h(Rows, { label: `Partitions of ${group.consumer}`, rows: group.partitions, id: (row) => `${row.topic}/${row.partition}`, columns: partitionColumns(data) }))),
    state === "APPLIED" && !data.undo_of && h(Verified, { consumer, id: data.rewind_id }));
}

const some = (data, has) => data.groups.some((group) => group.partitions.some(has));

export const partitionColumns = (data) => [
  { name: "Partition", cell: (row) => `${row.topic}/${row.partition}` },
  { name: "From", end: true, cell: (row) => number(row.old) },
  { name: "To", end: true, cell: (row) => number(row.new) },
  { name: "Read again", end: true, cell: (row) => number(row.replay) },
  { name: "Skipped", end: true, cell: (row) => number(row.skip) },
  { name: "Rows out", end: true, cell: (row) => number(row.sink_rows) },
  { name: "Failed out", end: true, cell: (row) => number(row.failed_records) },
  ...(data.undo_of ? [{ name: "Rows back", end: true, cell: (row) => number(row.rows_back) }, { name: "Failed back", end: true, cell: (row) => number(row.failed_back) }] : []),
  ...(some(data, (row) => row.lost) ? [{ name: "Lost", cell: (row) => row.lost && `[${number(row.lost[0])}, ${number(row.lost[1])})` }] : []),
  ...(some(data, (row) => row.backfill_left !== null)
    ? [{ name: "Backfill left", end: true, cell: (row) => row.backfill_left === null ? null : number(row.backfill_left) }] : []),
];

// The changes of the replay, compared on demand. beside: it is not swapped yet.
function Verified({ consumer, id, beside = false }) {
  const [comparisons, setComparisons] = useState(0);
  return h(Section, { title: beside ? "What the swap would change" : "What the replay has changed", aside: h(Button, { size: "xs", variant: "outline", onClick: () => setComparisons(comparisons + 1) }, comparisons ? "Compare again" : "Compare") },
    comparisons ? h(Compared, { consumer, id, beside, key: comparisons })
      : h(Muted, null, beside ? "Compares the live rows that the swap would take out with those of the replay." : "Compares the rows that were taken out with those that have been written since."));
}

function Compared({ consumer, id, beside }) {
  const state = useData(api("groups", consumer, "rewinds", id, "verified"), { refresh: false });
  return h(Loaded, { state }, (data) => data.unknown ? h(Notice, { tone: "warning", role: "alert", title: "No comparison at the moment" }, data.unknown)
    : data.groups.map((group) => h(Box, { key: group.consumer, mb: 4 },
      h(Text, null, `${group.consumer}, table ${group.table}: ${counted(group.replayed, "offset")} read ${beside ? "beside" : "again"}${group.left ? `, ${number(group.left)} still to read` : ""}`),
      h(Flex, { as: "dl", gap: 6, my: 2 }, ["equal", "changed", "gone", "new"].map((name) => h(Box, { key: name },
        h(Box, { as: "dt", color: "fg.muted", fontSize: "sm" }, name), h(Box, { as: "dd", fontWeight: "semibold", "data-verdict": name }, number(group[name]))))),
      !group.payloads && group.changed + group.gone + group.new > 0 && h(Muted, null, "Example rows are shown to users who may edit the consumer's DAG."),
      group.examples.map((example, index) => h(Example, { key: index, verdict: example.verdict, columns: example.columns, heads: beside ? ["Column", "Live", "Replay"] : ["Column", "Was", "Is now"] })))));
}

// A row before and after, side by side, with the differences marked.
const Example = ({ verdict, columns, heads }) =>
  h(Box, { mb: 3, overflowX: "auto", borderWidth: "1px", borderRadius: "md", p: 2, maxW: "52rem", tabIndex: 0 },
    h(Box, { as: "table", w: "100%", fontSize: "sm", css: { "& th, & td": { textAlign: "start", verticalAlign: "top", padding: "2px 8px", overflowWrap: "anywhere" }, "& th": { whiteSpace: "nowrap" } } },
      h("caption", { style: { textAlign: "start", fontWeight: 600 } }, verdict),
      h("thead", null, h("tr", null, heads.map((name) => h("th", { key: name, scope: "col" }, name)))),
      h("tbody", null, columns.map((column) => h(Box, { as: "tr", key: column.column, "data-differs": column.differs || undefined, bg: column.differs ? "bg.warning" : undefined },
        h("th", { scope: "row", style: { fontWeight: column.differs ? 600 : 400 } }, column.column, column.differs && " ≠"),
        h("td", null, verdict === "new" ? "" : column.was ?? h(Muted, null, "null")), h("td", null, verdict === "gone" ? "" : column.now ?? h(Muted, null, "null")))))));
