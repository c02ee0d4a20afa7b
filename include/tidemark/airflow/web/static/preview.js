// The effects of a rewind, while its form is filled in.

import { Box, Flex, Muted, Notice, Section, Spinner, Text, api, counted, duration, h, number, query, useData, useEffect, useState, zoned } from "./base.js";
import { partitionColumns } from "./rewinds.js";
import { Rows } from "./table.js";

const SETTLED_MS = 500;

// The preview of the form's input.
export const usePreview = (consumer, input) => useSettled(input ? api("groups", consumer, "rewind-preview") + query(input) : null);

// The answer of a route that follows the form's input, requested once the input rests for a moment. An answer to earlier input is dropped.
export function useSettled(path) {
  const [settled, settle] = useState(null);
  useEffect(() => {
    const timer = setTimeout(() => settle(path), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [path]);
  const state = useData(path && settled === path ? path : null, { refresh: false });
  return path && settled === path ? state : { data: null, error: null };
}

export function Preview({ preview, complete, beside }) {
  const { data, error } = preview;
  const unknown = error?.message ?? data?.unknown;
  return h(Section, { title: "What it would do now" }, h(Box, { role: "status", "aria-label": "Preview", minW: 0 },
    !complete ? h(Muted, null, "Shown when the choice is complete.")
      : !data && !error ? h(Flex, { align: "center", gap: 2 }, h(Spinner, { size: "sm" }), "Counting")
        : unknown ? h(Notice, { tone: "warning", title: "No preview at the moment" }, unknown, " You can still request the rewind: its plan shows the effects.")
          : data.problems.length > 0 ? h(Problems, { data }) : h(Effects, { data, beside })));
}

const Problems = ({ data }) => h(Notice, { tone: "error", title: "The plan would be refused" },
  data.problems.map((problem) => h(Text, { key: problem, whiteSpace: "pre-line", overflowWrap: "anywhere" }, problem)),
  data.loss && h(Text, { mt: 1 }, "To plan it anyway, choose Allow loss above. It then starts at the start of the log, with the records that Kafka still has."));

function Effects({ data, beside }) {
  const many = data.groups.length > 1;
  return h(Box, null, h(Text, null, zoned(data.says)), h(Text, { fontWeight: "semibold", my: 1 }, sentence(data, beside)), data.groups.map((group) =>
    h(Box, { key: group.consumer, mt: 2 }, many && h(Text, { fontWeight: "medium" }, group.consumer),
      h(Text, { fontSize: "sm", mb: 2 }, afterwards(group, beside)),
      group.announced_assets.length > 0 && h(Notice, { tone: "warning", title: "Downstream DAGs have already been notified about these rows" },
        `Assets: ${group.announced_assets.join(", ")}. They get another event when the rewind is ${beside ? "swapped" : "applied"}.`),
      h(Rows, { label: `Preview of ${group.consumer}`, rows: group.partitions, id: (row) => `${row.topic}/${row.partition}`, columns: partitionColumns(data) }))));
}

function sentence(data, beside) {
  const tables = [...new Set(data.groups.map((group) => group.table))].join(", ");
  const gone = `${counted(data.sink_rows, "row leaves", "rows leave")} ${tables}${data.failed_records ? `, and ${counted(data.failed_records, "failed record leaves", "failed records leave")} the list of retries` : ""}`;
  if (beside) return `${counted(data.replay, "offset")} read beside the live rows; then, with the swap, ${gone}.`;
  const read = `${counted(data.replay, "offset")} read again${data.skip ? `, ${number(data.skip)} skipped` : ""}`;
  const back = `${counted(data.rows_back, "row")}${data.failed_back ? ` and ${counted(data.failed_back, "failed record")}` : ""} of rewind ${data.undo_of} come back`;
  return data.undo_of ? `${back}; ${gone}; ${read}.` : `${read}; ${gone}.`;
}

function afterwards(group, beside) {
  if (!group.lag_records) return "Nothing is left to read afterwards.";
  const time = group.catch_up_s === null ? "takes an unknown time, because no run has read yet"
    : `takes about ${duration(group.catch_up_s)}, at the ${number(Math.round(group.records_per_s * 10) / 10)} records/s of the fastest of its recent runs`;
  return `Reading ${counted(group.lag_records, "offset")} ${beside ? "beside" : "afterwards"} ${time}.`;
}
