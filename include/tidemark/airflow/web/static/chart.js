// Small charts as SVG. Colours are Chakra's variables, so that they follow the theme; each shape has a title to hover over.

import { Box, Muted, RouterLink, counted, h, moment, number, useNavigate, useRef, useState } from "./base.js";
import { rewindPath } from "./preview.js";

const PALETTE = ["blue", "teal", "purple", "orange", "cyan", "pink", "green", "yellow"];
const colour = (name, shade = 500) => `var(--chakra-colors-${name}-${shade})`;
const AXIS = "var(--chakra-colors-fg-muted)";
const WORDS = { fontSize: "11px" }; // Airflow's style sheet overrides the attribute
const LINE = "var(--chakra-colors-border)";

export const attemptColour = (attempt) => (attempt.state === "FAILED" ? "red" : PALETTE[attempt.attempt_id % PALETTE.length]);

// Batches over time, a lane for each partition, coloured by attempt. A failed attempt is a dashed line where it ended. With a consumer, each
// batch links to a rewind to it: the newest can be reached by Tab, the others from there with the arrow keys.
export function Timeline({ batches, attempts, consumer, width = 1000 }) {
  if (!batches.length) return h(Muted, null, "No batch was committed by the last runs.");
  const lanes = [...new Set(batches.map((one) => `${one.topic}/${one.partition}`))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).slice(0, 16);
  const by = new Map(attempts.map((one) => [one.attempt_id, one]));
  const times = [...batches.map((one) => Date.parse(one.committed_at)), ...attempts.filter((one) => one.ended_at).map((one) => Date.parse(one.ended_at))];
  const from = Math.min(...times), until = Math.max(...times, from + 1000);
  const left = Math.min(130, width / 3), lane = 22, height = lanes.length * lane + 26;
  const x = (time) => left + ((time - from) / (until - from)) * (width - left - 20);
  const most = Math.max(...batches.map((one) => one.end_offset - one.start_offset));
  return h(Box, { overflowX: "auto" }, h("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `${batches.length} batches of ${lanes.length} partitions over time` },
    lanes.map((name, index) => h("g", { key: name },
      h("text", { x: left - 8, y: index * lane + 15, textAnchor: "end", style: WORDS, fill: AXIS }, name.length > 20 ? `…${name.slice(-19)}` : name),
      h("line", { x1: left, x2: width - 12, y1: index * lane + 11, y2: index * lane + 11, stroke: LINE }))),
    attempts.filter((one) => one.state === "FAILED").map((one) =>
      h("line", { key: `f${one.attempt_id}`, x1: x(Date.parse(one.ended_at)), x2: x(Date.parse(one.ended_at)), y1: 0, y2: height - 20,
        stroke: colour(one.error_kind === "fenced" ? "purple" : "red"), strokeDasharray: "3 3" }, h("title", null, `attempt ${one.attempt_id} ${one.error_kind === "fenced" ? "was fenced" : "failed"}: ${one.error}`))),
    batches.map((one, index) => {
      const row = lanes.indexOf(`${one.topic}/${one.partition}`);
      if (row < 0) return null;
      const radius = 3 + 4 * Math.sqrt((one.end_offset - one.start_offset) / most);
      const attempt = by.get(one.attempt_id) ?? { attempt_id: one.attempt_id, state: "" };
      const words = `batch ${one.batch_id}, attempt ${one.attempt_id}: [${number(one.start_offset)}, ${number(one.end_offset)}) at ${moment(one.committed_at)}; ` +
        `${number(one.loaded)} loaded, ${number(one.retried)} to retry, ${number(one.failed)} failed${one.deleted ? `, ${counted(one.deleted, "delete")}` : ""}`;
      const circle = h("circle", { key: one.batch_id, cx: x(Date.parse(one.committed_at)), cy: row * lane + 11, r: radius,
        fill: colour(attemptColour(attempt)), fillOpacity: 0.75, stroke: one.failed || one.retried ? colour("red") : "none" },
        h("title", null, consumer && !one.drained ? `${words}. Rewind to before it.` : words));
      return consumer && !one.drained
        ? h(RouterLink, { key: one.batch_id, to: rewindPath(consumer, "to-batch", one.batch_id), tabIndex: index ? -1 : 0, "aria-label": `Rewind to before ${words}`, onKeyDown: toNeighbour }, circle)
        : circle;
    }),
    h("text", { x: width < 500 ? 0 : left, y: height - 4, style: WORDS, fill: AXIS }, moment(new Date(from).toISOString())),
    h("text", { x: width - 12, y: height - 4, style: WORDS, fill: AXIS, textAnchor: "end" }, moment(new Date(until).toISOString()))));
}

function toNeighbour(event) {
  const step = { ArrowLeft: 1, ArrowRight: -1 }[event.key]; // newest first
  const links = step ? [...event.currentTarget.closest("svg").querySelectorAll("a")] : [];
  const next = links[links.indexOf(event.currentTarget) + step];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

// How many records come due when. bars: [{label, value}]
export function Bars({ bars, label, width = 620 }) {
  const most = Math.max(1, ...bars.map((one) => one.value));
  const step = width / bars.length, height = 90;
  return h(Box, { maxW: `${width}px` }, h("svg", { viewBox: `0 0 ${width} ${height + 18}`, width: "100%", role: "img", "aria-label": label },
    h("line", { x1: 0, x2: width, y1: height, y2: height, stroke: LINE }),
    bars.map((one, index) => {
      const size = one.value ? Math.max(3, (one.value / most) * (height - 8)) : 0;
      return h("rect", { key: one.label, x: index * step + 1, y: height - size, width: step - 2, height: size, rx: 1,
        fill: colour(index === 0 ? "orange" : "yellow") }, h("title", null, `${one.label}: ${number(one.value)}`));
    }),
    h("text", { x: 0, y: height + 14, style: WORDS, fill: AXIS }, bars[0].label),
    h("text", { x: width, y: height + 14, style: WORDS, fill: AXIS, textAnchor: "end" }, bars[bars.length - 1].label)));
}

// Verdicts, oldest left.
export function Strip({ verdicts, width = 620 }) {
  const colours = { passed: "green", warning: "orange", critical: "red" };
  const step = Math.min(24, width / Math.max(1, verdicts.length));
  return h(Box, { maxW: `${width}px` }, h("svg", { viewBox: `0 0 ${width} 30`, width: "100%", role: "img", "aria-label": `${verdicts.length} verdicts, oldest first` },
    verdicts.map((one, index) => h("rect", { key: one.validation_id, x: index * step, y: 2, width: Math.max(2, step - 2), height: 24, rx: 2,
      fill: colour(colours[one.verdict] ?? "gray") }, h("title", null, `${one.verdict}, ${moment(one.validated_at)}`)))));
}

// The lag of a group as a small line.
export function Sparkline({ values, width = 90, height = 22 }) {
  if (values.length < 2) return null;
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${(index / (values.length - 1)) * width},${height - 2 - (value / most) * (height - 4)}`).join(" ");
  return h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Lag of the last 3 hours, at most ${number(most)} records`, style: { display: "inline-block" } },
    h("polyline", { points, fill: "none", stroke: colour("blue"), strokeWidth: 1.5 }));
}

// The lag over a day, with what happened meanwhile. With a consumer, a moment can be picked to rewind to: with a click, or with the arrow keys
// and Enter.
export function LagChart({ history, rewinds, rebalances, failed, consumer, width = 1000, height = 170 }) {
  const navigate = useNavigate();
  const place = useRef(null);
  const [picked, pick] = useState(null);
  const left = 70, bottom = 24, times = history.map((one) => Date.parse(one.at));
  const from = times[0], until = Math.max(Date.now(), times[times.length - 1]);
  const most = Math.max(1, ...history.map((one) => one.records));
  const x = (time) => left + ((time - from) / (until - from)) * (width - left - 12);
  const y = (value) => 8 + (1 - value / most) * (height - bottom - 8);
  const line = history.map((one, index) => `${x(times[index])},${y(one.records)}`).join(" ");
  const marks = [...rewinds.map((one) => ({ at: one.at, tone: "purple", words: `rewind ${one.rewind_id} was applied` })),
    ...rebalances.map((one) => ({ at: one.at, tone: "gray", words: `generation ${one.generation}: ${one.reason}` })),
    ...failed.map((one) => ({ at: one.ended_at, tone: "red", words: `attempt ${one.attempt_id} failed: ${one.error}` }))].filter((one) => Date.parse(one.at) >= from);
  const words = `Lag over time, at most ${number(most)} records`;
  const whole = (time) => new Date(Math.floor(Math.min(until, Math.max(from, time)) / 1000) * 1000).toISOString().replace(".000", "");
  const at = (event) => {
    const box = place.current.getBoundingClientRect();
    return from + ((((event.clientX - box.left) / box.width) * width - left) / (width - left - 12)) * (until - from);
  };
  const open = (time) => navigate(rewindPath(consumer, "to-datetime", whole(time)));
  const onKeyDown = (event) => {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!step && event.key !== "Enter") return;
    event.preventDefault();
    if (!step) return void open(picked ?? until);
    const beside = step > 0 ? times.find((time) => time > (picked ?? until)) : times.findLast((time) => time < (picked ?? until));
    pick(beside ?? (step > 0 ? until : from));
  };
  const picks = consumer ? {
    ref: place, role: "slider", tabIndex: 0, "aria-label": `${words}. Arrow keys choose a moment, Enter opens a rewind to it`, "aria-valuemin": from, "aria-valuemax": until,
    "aria-valuenow": picked ?? until, "aria-valuetext": moment(whole(picked ?? until)), onKeyDown, onMouseMove: (event) => pick(at(event)), onMouseLeave: () => pick(null),
    onBlur: () => pick(null), onClick: (event) => open(at(event)),
  } : { role: "img", "aria-label": words };
  const mark = picked === null ? null : x(Math.min(until, Math.max(from, picked)));
  return h(Box, { overflowX: "auto" }, h("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", style: { cursor: consumer ? "crosshair" : undefined }, ...picks },
    (most > 1 ? [0, most / 2, most] : [0, most]).map((value) => h("g", { key: value }, h("line", { x1: left, x2: width - 12, y1: y(value), y2: y(value), stroke: LINE }),
      h("text", { x: left - 8, y: y(value) + 4, textAnchor: "end", style: WORDS, fill: AXIS }, number(Math.round(value))))),
    h("polygon", { points: `${left},${y(0)} ${line} ${x(times[times.length - 1])},${y(0)}`, fill: colour("blue"), fillOpacity: 0.15 }),
    h("polyline", { points: line, fill: "none", stroke: colour("blue"), strokeWidth: 1.5 }),
    marks.map((one) => h("line", { key: one.words, x1: x(Date.parse(one.at)), x2: x(Date.parse(one.at)), y1: 4, y2: height - bottom, stroke: colour(one.tone), strokeWidth: 2, strokeDasharray: "4 3" },
      h("title", null, `${one.words}, ${moment(one.at)}`))),
    history.map((one, index) => h("circle", { key: one.at, cx: x(times[index]), cy: y(one.records), r: 5, fill: "transparent" },
      h("title", null, `${moment(one.at)}: ${number(one.records)} records${one.seconds === null ? "" : `, ${Math.round(one.seconds)} s behind`}${one.replay ? `, ${number(one.replay)} to replay` : ""}`))),
    mark !== null && h("g", { pointerEvents: "none" }, h("line", { x1: mark, x2: mark, y1: 0, y2: height - bottom, stroke: AXIS }),
      h("text", { x: mark + (mark > width / 2 ? -6 : 6), y: 14, textAnchor: mark > width / 2 ? "end" : "start", style: WORDS, fill: "var(--chakra-colors-fg)" }, `Rewind to ${moment(whole(picked))} …`)),
    h("text", { x: left, y: height - 6, style: WORDS, fill: AXIS }, moment(history[0].at)),
    h("text", { x: width - 12, y: height - 6, style: WORDS, fill: AXIS, textAnchor: "end" }, "now")));
}
