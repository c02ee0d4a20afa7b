// A record with its payload.

import { A, Ago, Box, Button, Code, Due, Empty, Facts, Flex, LinkButton, Loaded, Muted, Notice, Section, State, Text, Title, api, counted,
  discardPath, h, moment, number, redrivePath, to, useData, useState } from "./base.js";

export function FailedRecord({ consumer, id }) {
  const state = useData(api("groups", consumer, "records", id), { refresh: false });
  if (state.error?.status === 403) {
    return h(Notice, { tone: "warning", role: "alert", title: "Your roles do not allow you to see this record's payload" },
      `You need the permission to edit the DAG of ${consumer}. `, h(A, { to: to("retries", consumer) }, "Back to the list"));
  }
  return h(Loaded, { state }, (data) => h(View, { consumer, data }));
}

function View({ consumer, data }) {
  const { row } = data;
  const earlier = data.tries.filter((failure) => failure.type !== REDRIVEN);
  return h(Box, null,
    h(Title, { text: `Record ${data.number} of ${consumer}` }, h(State, { value: row.state }), h(A, { to: to("retries", consumer) }, "Retries"), h(A, { to: to("groups", consumer) }, "Group"),
      data.forms.redrive && (row.state === "FAILED" || row.publish_error) && h(LinkButton, { to: redrivePath(consumer, { numbers: data.number }) }, "Redrive …"),
      data.forms.discard && ["WAITING", "HELD", "FAILED"].includes(row.state) && h(LinkButton, { to: discardPath(consumer, { numbers: data.number }) }, "Discard …")),
    h(Section, { title: "Why" }, h(Facts, { rows: [
      ["Error", row.error_type], ["Text", row.error_text], ["Read from", `${row.topic}/${row.partition} at offset ${number(row.offset)}`],
      ["Record's time", row.timestamp ? moment(row.timestamp) : "none"], ["First failed", h(Ago, { at: row.created_at })],
      row.due_at && ["Next try", h(Due, { at: row.due_at })], ["Failed tries", number(earlier.length + (row.error_type === REDRIVEN || row.state === "HELD" ? 0 : 1))], ["Redrives", number(row.redrives)],
      row.retry_topic && ["Retry topic", row.retry_offset === null ? `${row.retry_topic}, not published yet` : `${row.retry_topic}/${row.retry_partition} at ${number(row.retry_offset)}`],
      row.publish_error && ["Refused by the broker", row.publish_error],
      data.action && ["Last action", `${data.action.kind} by ${data.action.by}, ${moment(data.action.at)}: ${data.action.reason}`],
    ] })),
    row.emptied_at ? h(Empty, { title: "The payload was removed" }, `By maintenance, ${moment(row.emptied_at)}`) : h(Box, null,
      h(Section, { title: "Value" }, h(Bytes, { value: data.payload.value })),
      h(Section, { title: "Key" }, h(Bytes, { value: data.payload.key })),
      h(Section, { title: "Headers" }, data.payload.headers.length
        ? data.payload.headers.map((header, index) => h(Box, { key: index, mb: 3 }, h(Code, null, header.name), h(Bytes, { value: header.value })))
        : h(Muted, null, "none"),
        data.payload.more_headers > 0 && h(Muted, null, `${counted(data.payload.more_headers, "more header")} not shown.`))),
    h(Section, { title: "Earlier tries", aside: data.tries.length > earlier.length && h(Muted, null, "a redrive is no try") }, data.tries.length
      ? h(Box, { as: "ol", ps: 5, listStyleType: "decimal", fontSize: "sm" }, data.tries.map((failure, index) =>
        h("li", { key: index, style: failure.type === REDRIVEN ? { listStyleType: "none" } : undefined, value: failure.type === REDRIVEN ? undefined : earlier.indexOf(failure) + 1 }, h(Text, { as: "span", fontWeight: "medium" }, failure.type), ` ${failure.text} `, h(Muted, null, moment(failure.at)))))
      : h(Muted, null, "None.")),
    data.edits.length > 0 && h(Section, { title: "Before its edits" },
      data.more_edits > 0 && h(Muted, null, `${counted(data.more_edits, "earlier edit")} not shown.`), data.edits.map((edit, index) =>
      h(Box, { key: index, mb: 4 }, h(Text, { fontSize: "sm" }, `${edit.by}, ${moment(edit.at)}: ${edit.reason}`), h(Bytes, { value: edit.was.value })))));
}

const REDRIVEN = "Redriven"; // stands for an error until the first try after a redrive

// Bytes as JSON, text or hex. React inserts them as text, whatever they hold.
function Bytes({ value }) {
  const forms = [value?.json !== null && "json", value?.text !== null && "text", "hex"].filter(Boolean);
  const [chosen, choose] = useState(null);
  if (value === null) return h(Muted, null, "null");
  const form = forms.includes(chosen) ? chosen : forms[0];
  return h(Box, { mt: 1 },
    h(Flex, { gap: 1, mb: 1, align: "center" }, forms.map((choice) => h(Button, { key: choice, size: "xs", variant: choice === form ? "solid" : "outline", "aria-pressed": choice === form, onClick: () => choose(choice) }, choice)),
      h(Muted, null, counted(value.bytes, "byte"))),
    value.problem && h(Muted, { display: "block" }, `Not decoded: ${value.problem}`),
    value.cut && h(Muted, { display: "block" }, "Only the beginning is shown."),
    value.not_laid_out && h(Muted, { display: "block" }, "Its JSON is too long or nested too deeply to be laid out."),
    form === "hex" && value.bytes > 4096 && h(Muted, { display: "block" }, "Only the first 4,096 bytes."),
    h(Box, { as: "pre", tabIndex: 0, "data-payload": form, fontSize: "xs", bg: "bg.muted", p: 3, borderRadius: "md", maxH: "24rem", overflow: "auto", whiteSpace: "pre-wrap", overflowWrap: "anywhere" }, value[form]));
}
