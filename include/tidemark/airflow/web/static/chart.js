// Small charts as SVG. Colours are Chakra's variables, so that they follow the theme; each shape has a title to hover over.

import { Box, Muted, RouterLink, counted, h, local, moment, number, rewindPath, takenOver, useNavigate, useRef, useState, utc } from "./base.js";

const PALETTE = ["blue", "teal", "purple", "orange", "cyan", "pink", "green", "yellow"];
const colour = (name, shade = 500) => `var(--chakra-colors-${name}-${shade})`;
const AXIS = "var(--chakra-colors-fg-muted)";
const WORDS = { fontSize: "11px" }; // Airflow's style sheet overrides the attribute
const LINE = "var(--chakra-colors-border)";

const attemptColour = (attempt) => (attempt.state === "FAILED" && !takenOver(attempt) ? "red" : PALETTE[attempt.attempt_id % PALETTE.length]);

// Batches over time, a lane for each partition, coloured by attempt. A failed attempt is a dashed line where it ended. With a consumer, each
// batch links to a rewind to it: the newest can be reached by Tab, the others from there with the arrow keys.
export function Timeline({ batches, attempts, consumer, width = 1000 }) {
  if (!batches.length) return h(Muted, null, "No batch was committed by the last runs.");
  const lanes = [...new Set(batches.map((batch) => `${batch.topic}/${batch.partition}`))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).slice(0, 16);
  const attemptsById = new Map(attempts.map((attempt) => [attempt.attempt_id, attempt]));
  const times = [...batches.map((batch) => Date.parse(batch.committed_at)), ...attempts.filter((attempt) => attempt.ended_at).map((attempt) => Date.parse(attempt.ended_at))];
  const from = Math.min(...times), until = Math.max(...times, from + 1000);
  const left = Math.min(130, width / 3), lane = 22, height = lanes.length * lane + 26;
  const x = (time) => left + ((time - from) / (until - from)) * (width - left - 20);
  const most = Math.max(...batches.map((batch) => batch.end_offset - batch.start_offset));
  return h(Box, { overflowX: "auto" }, h("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `${batches.length} batches of ${lanes.length} partitions over time` },
    lanes.map((name, index) => h("g", { key: name },
      h("text", { x: left - 8, y: index * lane + 15, textAnchor: "end", style: WORDS, fill: AXIS }, name.length > 20 ? `…${name.slice(-19)}` : name),
      h("line", { x1: left, x2: width - 12, y1: index * lane + 11, y2: index * lane + 11, stroke: LINE }))),
    attempts.filter((attempt) => attempt.state === "FAILED").map((attempt) =>
      h("line", { key: `f${attempt.attempt_id}`, x1: x(Date.parse(attempt.ended_at)), x2: x(Date.parse(attempt.ended_at)), y1: 0, y2: height - 20,
        stroke: colour(takenOver(attempt) ? "purple" : "red"), strokeDasharray: "3 3" },
      h("title", null, takenOver(attempt) ? `a newer attempt took over from attempt ${attempt.attempt_id}` : `attempt ${attempt.attempt_id} failed: ${attempt.error}`))),
    batches.map((batch, index) => {
      const row = lanes.indexOf(`${batch.topic}/${batch.partition}`);
      if (row < 0) return null;
      const radius = 3 + 4 * Math.sqrt((batch.end_offset - batch.start_offset) / most);
      const attempt = attemptsById.get(batch.attempt_id) ?? { attempt_id: batch.attempt_id, state: "" };
      const words = `batch ${batch.batch_id}, attempt ${batch.attempt_id}: [${number(batch.start_offset)}, ${number(batch.end_offset)}) at ${moment(batch.committed_at)}; ` +
        `${number(batch.loaded)} loaded, ${number(batch.retried)} to retry, ${number(batch.failed)} failed${batch.deleted ? `, ${counted(batch.deleted, "delete")}` : ""}`;
      const circle = h("circle", { key: batch.batch_id, cx: x(Date.parse(batch.committed_at)), cy: row * lane + 11, r: radius,
        fill: colour(attemptColour(attempt)), fillOpacity: 0.75, stroke: batch.failed || batch.retried ? colour("red") : "none" },
        h("title", null, consumer && !batch.drained ? `${words}. Rewind to before it.` : words));
      return consumer && !batch.drained
        ? h(RouterLink, { key: batch.batch_id, to: rewindPath(consumer, "to-batch", batch.batch_id), tabIndex: index ? -1 : 0, "aria-label": `Rewind to before ${words}`, onKeyDown: toNeighbour }, circle)
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

// The number of records that come due in each minute. bars: [{label, value}]
export function Bars({ bars, label, width = 620 }) {
  const most = Math.max(1, ...bars.map((bar) => bar.value));
  const step = width / bars.length, height = 90;
  return h(Box, { maxW: `${width}px` }, h("svg", { viewBox: `0 0 ${width} ${height + 18}`, width: "100%", role: "img", "aria-label": label },
    h("line", { x1: 0, x2: width, y1: height, y2: height, stroke: LINE }),
    bars.map((bar, index) => {
      const size = bar.value ? Math.max(3, (bar.value / most) * (height - 8)) : 0;
      return h("rect", { key: bar.label, x: index * step + 1, y: height - size, width: step - 2, height: size, rx: 1,
        fill: colour(index === 0 ? "orange" : "yellow") }, h("title", null, `${bar.label}: ${number(bar.value)}`));
    }),
    h("text", { x: 0, y: height + 14, style: WORDS, fill: AXIS }, bars[0].label),
    h("text", { x: width, y: height + 14, style: WORDS, fill: AXIS, textAnchor: "end" }, bars[bars.length - 1].label)));
}

// Verdicts, oldest left.
export function Strip({ verdicts, width = 620 }) {
  const colours = { passed: "green", warning: "orange", critical: "red" };
  const step = Math.min(24, width / Math.max(1, verdicts.length));
  return h(Box, { maxW: `${width}px` }, h("svg", { viewBox: `0 0 ${width} 30`, width: "100%", role: "img", "aria-label": `${verdicts.length} verdicts, oldest first` },
    verdicts.map((verdict, index) => h("rect", { key: verdict.validation_id, x: index * step, y: 2, width: Math.max(2, step - 2), height: 24, rx: 2,
      fill: colour(colours[verdict.verdict] ?? "gray") }, h("title", null, `${verdict.verdict}, ${moment(verdict.validated_at)}`)))));
}

// The lag of a group as a small line.
export function Sparkline({ values, width = 90, height = 22 }) {
  if (values.length < 2) return null;
  const most = Math.max(1, ...values);
  const points = values.map((value, index) => `${(index / (values.length - 1)) * width},${height - 2 - (value / most) * (height - 4)}`).join(" ");
  return h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Lag of the last 3 hours, at most ${number(most)} records`, style: { display: "inline-block" } },
    h("polyline", { points, fill: "none", stroke: colour("blue"), strokeWidth: 1.5 }));
}

const STEPS_MIN = [5, 15, 30, 60, 120, 180, 240, 360, 720, 1440];

// Full hours, or quarters of them, of the user's day between two times: at most so many.
function hours(from, until, most) {
  const step = (STEPS_MIN.find((minutes) => (until - from) / (minutes * 60000) <= most) ?? 1440) * 60000;
  const ahead = Date.parse(`${local(from)}Z`) - from; // of UTC
  const first = Math.ceil((from + ahead) / step) * step - ahead;
  return Array.from({ length: Math.max(0, Math.ceil((until - first) / step)) }, (_, index) => first + index * step);
}

// "14:00", and at midnight the date: "03-29".
function hour(time) {
  const [date, clock] = local(time).split("T");
  return clock.startsWith("00:00") ? date.slice(5) : clock.slice(0, 5);
}

// The lag over a day, with the rewinds, rebalances and failures in it. With a consumer, a click, or the arrow keys and Enter, pick a moment to
// rewind to.
export function LagChart({ history, rewinds, rebalances, failed, consumer, width = 1000, height = 170 }) {
  const navigate = useNavigate();
  const place = useRef(null);
  const [picked, pick] = useState(null);
  const left = 70, bottom = 24, times = history.map((sample) => Date.parse(sample.at));
  const from = times[0], until = Math.max(Date.now(), times[times.length - 1]);
  const most = Math.max(1, ...history.map((sample) => sample.records));
  const x = (time) => left + ((time - from) / (until - from)) * (width - left - 12);
  const y = (value) => 8 + (1 - value / most) * (height - bottom - 8);
  const line = history.map((sample, index) => `${x(times[index])},${y(sample.records)}`).join(" ");
  const end = times[times.length - 1], last = y(history[history.length - 1].records);
  const marks = [...rewinds.map((rewind) => ({ at: rewind.at, tone: "purple", words: `rewind ${rewind.rewind_id} was applied` })),
    ...rebalances.map((rebalance) => ({ at: rebalance.at, tone: "gray", words: `generation ${rebalance.generation}: ${rebalance.reason}` })),
    ...failed.map((attempt) => ({ at: attempt.ended_at, tone: "red", words: `attempt ${attempt.attempt_id} failed: ${attempt.error}` }))].filter((event) => Date.parse(event.at) >= from);
  const words = `Lag over time, at most ${number(most)} records`;
  const whole = (time) => utc(Math.min(until, Math.max(from, time)));
  const marked = hours(from, until, Math.max(2, Math.floor((width - left) / 110)));
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
    h("polygon", { points: `${left},${y(0)} ${line} ${x(end)},${y(0)}`, fill: colour("blue"), fillOpacity: 0.15 }),
    h("polyline", { points: line, fill: "none", stroke: colour("blue"), strokeWidth: 1.5 }),
    h("line", { x1: x(end), x2: x(until), y1: last, y2: last, stroke: colour("blue"), strokeWidth: 1.5, strokeDasharray: "2 4" }, h("title", null, "as of the last sample")),
    marks.map((event) => h("line", { key: event.words, x1: x(Date.parse(event.at)), x2: x(Date.parse(event.at)), y1: 4, y2: height - bottom, stroke: colour(event.tone), strokeWidth: 2, strokeDasharray: "4 3" },
      h("title", null, `${event.words}, ${moment(event.at)}`))),
    history.map((sample, index) => h("circle", { key: sample.at, cx: x(times[index]), cy: y(sample.records), r: 5, fill: "transparent" },
      h("title", null, `from ${moment(sample.at)}: at most ${number(sample.records)} records${sample.seconds === null ? "" : `, ${Math.round(sample.seconds)} s behind`}${sample.replay ? `, ${number(sample.replay)} to replay` : ""}`))),
    mark !== null && h("g", { pointerEvents: "none" }, h("line", { x1: mark, x2: mark, y1: 0, y2: height - bottom, stroke: AXIS }),
      h("text", { x: mark + (mark > width / 2 ? -6 : 6), y: 14, textAnchor: mark > width / 2 ? "end" : "start", style: WORDS, fill: "var(--chakra-colors-fg)" }, `Rewind to ${moment(whole(picked))} …`)),
    marked.filter((time) => x(time) > left + 20 && x(time) < width - 60).map((time) => h("g", { key: time }, h("line", { x1: x(time), x2: x(time), y1: height - bottom, y2: height - bottom + 5, stroke: AXIS }),
      h("text", { x: x(time), y: height - 6, textAnchor: "middle", style: WORDS, fill: AXIS }, hour(time)))),
    h("text", { x: width - 12, y: height - 6, style: WORDS, fill: AXIS, textAnchor: "end" }, "now")));
}
