// What a rewind would do, while its form is filled in; and the ways into that form.

import { Box, Flex, Muted, Notice, Section, Spinner, Text, api, counted, duration, h, number, query, to, useData, useEffect, useState } from "./base.js";
import { partitionColumns } from "./rewinds.js";
import { Rows } from "./table.js";

const SETTLED_MS = 500;

export const rewindPath = (consumer, scenario, value) => to("groups", consumer, "rewind") + query({ scenario, value });

// The answer to what the form says, asked when it has not changed for a moment. An answer to an earlier choice is dropped.
export function usePreview(consumer, asked) {
  const path = asked ? api("groups", consumer, "rewind-preview") + query(asked) : null;
  const [settled, settle] = useState(null);
  useEffect(() => {
    const timer = setTimeout(() => settle(path), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [path]);
  const state = useData(path && settled === path ? path : null, { refresh: false });
  return path && settled === path ? state : { data: null, error: null };
}

export function Preview({ preview, complete }) {
  const { data, error } = preview;
  const unknown = error?.message ?? data?.unknown;
  return h(Section, { title: "What it would do now" }, h(Box, { role: "status", "aria-label": "Preview", minW: 0 },
    !complete ? h(Muted, null, "Shown when the choice is complete.")
      : !data && !error ? h(Flex, { align: "center", gap: 2 }, h(Spinner, { size: "sm" }), "Counting")
        : unknown ? h(Notice, { tone: "warning", title: "It cannot be said now what this would do" }, unknown, " It can be requested nevertheless: the plan will say it.")
          : data.problems.length > 0 ? h(Problems, { data }) : h(Found, { data })));
}

const Problems = ({ data }) => h(Notice, { tone: "error", title: "The plan would be refused" },
  data.problems.map((one) => h(Text, { key: one, whiteSpace: "pre-line", overflowWrap: "anywhere" }, one)),
  data.loss && h(Text, { mt: 1 }, "Allow loss above plans it nevertheless: from the start of the log on, and with what Kafka still has."));

function Found({ data }) {
  const many = data.groups.length > 1;
  return h(Box, null, h(Text, null, data.says), h(Text, { fontWeight: "semibold", my: 1 }, sentence(data)), data.groups.map((group) =>
    h(Box, { key: group.consumer, mt: 2 }, many && h(Text, { fontWeight: "medium" }, group.consumer),
      h(Text, { fontSize: "sm", mb: 2 }, afterwards(group)),
      group.told.length > 0 && h(Notice, { tone: "warning", title: "Downstream has been told of these rows" },
        `Assets: ${group.told.join(", ")}. They get another event when the rewind is applied.`),
      h(Rows, { label: `Preview of ${group.consumer}`, rows: group.partitions, id: (row) => `${row.topic}/${row.partition}`, columns: partitionColumns(data) }))));
}

const both = (rows, failed) => `${counted(rows, "row")} and ${counted(failed, "failed record")}`;

function sentence(data) {
  const tables = [...new Set(data.groups.map((group) => group.table))].join(", ");
  const gone = `${both(data.sink_rows, data.failed_records)} leave ${tables}`;
  const read = `${counted(data.replay, "offset")} read again${data.skip ? `, ${number(data.skip)} skipped` : ""}`;
  return data.undo_of ? `${both(data.rows_back, data.failed_back)} of rewind ${data.undo_of} come back; ${gone}; ${read}.` : `${read}; ${gone}.`;
}

function afterwards(group) {
  if (!group.lag_records) return "Nothing is left to read afterwards.";
  const time = group.catch_up_s === null ? "for an unknown time, because the group has not read yet"
    : `for about ${duration(group.catch_up_s)} at ${number(Math.round(group.records_per_s * 10) / 10)} records/s`;
  return `Afterwards ${counted(group.lag_records, "offset")} are to be read, ${time}.`;
}
