// Every action of a person, newest first.

import { A, Ago, Banners, Box, Button, Code, ConsumerPicker, Empty, Flex, Input, Loaded, Muted, RunLink, Select, Text, api, h, query, to, useData,
  useParam } from "./base.js";
import { Rows } from "./table.js";

const KINDS = ["REWIND", "REDRIVE", "DISCARD", "EDIT", "FLOW", "GROUP", "OFFSETS", "ERASURE", "MAINTENANCE", "MIGRATED"];

export function Audit() {
  const [consumer, setConsumer] = useParam("consumer");
  const [kind, setKind] = useParam("kind");
  const [person, setPerson] = useParam("person");
  const filter = query({ consumer, kind, person });
  const state = useData(api("audit") + filter);
  const csv = new URL(api("audit.csv") + filter, document.baseURI).href;
  return h(Box, null,
    h(Flex, { gap: 2, mb: 3, wrap: "wrap", align: "center" }, h(ConsumerPicker, { value: consumer, onChange: setConsumer }),
      h(Select, { label: "Kind of action", value: kind, onChange: setKind, options: [["", "All actions"], ...KINDS.map((action) => [action, action.toLowerCase()])] }),
      h(Input, { size: "sm", maxW: "14rem", "aria-label": "Who", placeholder: "Who", value: person, onChange: (event) => setPerson(event.target.value) }),
      h(Button, { asChild: true, size: "sm", variant: "outline" }, h("a", { href: csv, download: "tidemark-audit.csv" }, "CSV"))),
    h(Loaded, { state }, (data) => h(Box, null, h(Banners, { banners: data.banners }), data.events.length
      ? h(Rows, { label: "Audit", rows: data.events, id: (row) => `${row.connection}/${row.event_id}`, columns: COLUMNS })
      : h(Empty, { title: "No action" }, "Rewinds, redrives, edits, pauses and deletions appear here."),
    data.events.length >= data.limit && h(Muted, null, `The newest ${data.limit} are shown; the CSV has more.`))));
}

const WORDS = { "REWIND BESIDE": "rewind begun beside", "REWIND DISCARDED": "replay of a rewind discarded" };

const COLUMNS = [
  { name: "Action", cell: (row) => h(Text, { as: "span", fontWeight: "semibold" }, WORDS[row.kind] ?? row.kind.toLowerCase()) },
  { name: "When", cell: (row) => h(Ago, { at: row.at }) },
  { name: "Who", cell: (row) => h(Box, null, row.claimed_by ?? "–", h(Muted, { display: "block" }, `role ${row.database_role}`)) },
  { name: "Consumer", cell: (row) => row.consumer ? h(A, { to: to("groups", row.consumer) }, row.consumer) : row.group ?? h(Muted, null, "whole database") },
  { name: "Plan", cell: (row) => row.plan && row.consumer && row.kind.startsWith("REWIND") ? h(A, { to: to("rewinds", row.consumer, row.plan) }, `Rewind ${row.plan}`) : row.plan },
  { name: "Why", cell: (row) => h(Box, { maxW: "24rem" }, row.reason) },
  { name: "DAG run", cell: (row) => row.run_id && h(RunLink, { row }) },
  { name: "Details", cell: (row) => Object.keys(row.details).length > 0 && h(Box, { as: "details", fontSize: "xs" }, h(Box, { as: "summary", cursor: "pointer", color: "fg.info" }, "Show"), h(Code, { whiteSpace: "pre-wrap" }, JSON.stringify(row.details, null, 1))) },
];
