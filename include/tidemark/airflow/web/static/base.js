// Shared by all views: Airflow's React and Chakra, data that refreshes itself, texts for numbers and times, addresses.

export const { createElement: h, Fragment, useCallback, useEffect, useMemo, useRef, useState } = globalThis.React;
export const { Link: RouterLink, useLocation, useNavigate } = globalThis.ReactRouterDOM;
const { Badge, Box, Button, Code, Flex, Heading, Input, Link, Spinner, Text, Textarea } = globalThis.ChakraUI;
export { Badge, Box, Button, Code, Flex, Heading, Input, Link, Spinner, Text, Textarea };

export const HOME = "/plugin/tidemark";
const REFRESH_MS = 5000;

// A path of the page: to("groups", name) is /plugin/tidemark/groups/<name>.
export const to = (...parts) => [HOME, ...parts.map((part) => encodeURIComponent(String(part)))].join("/");
export const api = (...parts) => "tidemark/api/" + parts.map((part) => encodeURIComponent(String(part))).join("/");
// Whether the texts have each word of a search.
export const matches = (search, ...texts) => search.toLowerCase().split(/\s+/).every((word) => texts.join(" ").toLowerCase().includes(word));
export const query = (values) => {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== undefined && value !== null && value !== "") params.append(name, value);
  }
  const text = params.toString();
  return text ? `?${text}` : "";
};

// The addresses of the forms, with their first values.
const formPath = (form, consumer, values = {}) => to("groups", consumer, form) + query(values);
export const rewindPath = (consumer, scenario, value) => formPath("rewind", consumer, { scenario, value });
export const redrivePath = (consumer, filter) => formPath("redrive", consumer, filter);
export const discardPath = (consumer, filter) => formPath("discard", consumer, filter);

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const WORDS = {
  401: "Your session is over. Reload the page and sign in again.",
  403: "Your roles do not allow this. Ask an administrator for the permission on the consumer's DAG.",
};

export async function request(path, options = {}) {
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "Airflow's api-server does not answer. The page asks again by itself.");
  }
  const text = await answer.text();
  if (answer.ok) return text;
  let detail = "";
  try {
    const reason = JSON.parse(text).detail;
    detail = typeof reason === "string" ? reason : Array.isArray(reason) ? reason.map((problem) => problem.msg).join("; ") : JSON.stringify(reason ?? "");
  } catch {
    detail = text.slice(0, 300);
  }
  throw new Refused(answer.status, WORDS[answer.status] ?? (detail || `The server answered ${answer.status}.`));
}

// The answer of a route, fetched again every few seconds while the page is visible. The last answer stays while the next one is fetched,
// and after an error. An identical answer redraws nothing.
export function useData(path, { refresh = true } = {}) {
  const [state, setState] = useState({ path, data: null, error: null });
  useEffect(() => {
    if (!path) return undefined;
    const stop = new AbortController();
    let timer = 0;
    let last = null;
    const ask = async () => {
      if (!document.hidden || last === null) {
        try {
          const text = await request(path, { signal: stop.signal });
          if (text === last) setState((was) => (was.error ? { ...was, error: null } : was));
          else setState({ path, data: JSON.parse(text), error: null });
          last = text;
        } catch (error) {
          if (stop.signal.aborted) return;
          setState((was) => ({ path, data: was.path === path ? was.data : null, error }));
          if (error.status === 401 || error.status === 403 || error.status === 404) return;
        }
      }
      if (refresh && !stop.signal.aborted) timer = setTimeout(ask, REFRESH_MS);
    };
    ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path, refresh]);
  return state.path === path ? state : { path, data: null, error: null };
}

// ---- texts

export const number = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US"));
export const atMost = (value, most) => (value >= most ? `${number(most)}+` : number(value));
export const counted = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size > 0 && size < 1) return `${Math.round(size * 1000)} ms`;
  if (size < 90) return `${Math.round(size)} s`;
  if (size < 5400) return `${Math.round(size / 60)} min`;
  if (size < 129600) return `${Math.round(size / 3600)} h`;
  return `${Math.round(size / 86400)} d`;
}

// Records a second: "12", "0.3", "0.002".
export const rate = (value) => (value === null || value === undefined ? "–" : value === 0 ? "0" : Number(value.toPrecision(2)).toLocaleString("en-US", { maximumFractionDigits: 3 }));

// ---- times, in the zone that the user has chosen in Airflow, which keeps it in the browser; otherwise in the browser's own

export function zone() {
  const chosen = (globalThis.localStorage.getItem("timezone") ?? "").replaceAll('"', "");
  return clock(chosen) ? chosen : BROWSERS_ZONE;
}

const BROWSERS_ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;

const clocks = new Map();

function clock(name) {
  if (!clocks.has(name)) {
    try {
      clocks.set(name, new Intl.DateTimeFormat("en-US", { timeZone: name, hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit",
        hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "longOffset" }));
    } catch {
      clocks.set(name, null);
    }
  }
  return clocks.get(name);
}

const partsOf = (time) => Object.fromEntries(clock(zone()).formatToParts(time).map((part) => [part.type, part.value]));
// Years have four digits: a field reports the year 0002 while 2026 is being typed.
const wall = (parts) => `${parts.year.padStart(4, "0")}-${parts.month}-${parts.day}T${parts.hour}:${parts.minute}:${parts.second}`;

// The time in the user's zone, as a field for dates and times takes it: 2026-03-29T14:00:00.
export const local = (time) => wall(partsOf(new Date(time)));

// "2026-03-29 14:00:00 +02:00"
export function moment(text) {
  if (!text) return "–";
  const parts = partsOf(new Date(text));
  return `${wall(parts).replace("T", " ")} ${parts.timeZoneName.replace(/^GMT([+]00:00)?/, "") || "UTC"}`;
}

// A sentence of the server, with its moments in the user's zone.
export const zoned = (text) => text.replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z/g, moment);

// The moment of a time in the user's zone, in UTC without fractions of a second. The first one, if the clock shows it twice.
export function fromLocal(text) {
  const asUtc = Date.parse(`${text}Z`);
  if (Number.isNaN(asUtc)) return "";
  const offset = (time) => Date.parse(`${local(time)}Z`) - time;
  const times = [asUtc - offset(asUtc - 86400000), asUtc - offset(asUtc + 86400000)].filter((time) => offset(time) === asUtc - time);
  return utc(Math.min(...(times.length ? times : [asUtc - offset(asUtc)])));
}

export const utc = (time) => new Date(Math.floor(time / 1000) * 1000).toISOString().replace(".000", "");

// "3 min ago", with the exact moment on hover.
export function Ago({ at }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 5000);
    return () => clearInterval(timer);
  }, []);
  if (!at) return h(Text, { as: "span", color: "fg.muted" }, "–");
  const seconds = (now - new Date(at).getTime()) / 1000;
  const words = seconds >= 0 ? (seconds < 5 ? "just now" : `${duration(seconds)} ago`) : `in ${duration(seconds)}`;
  return h("time", { dateTime: at, title: moment(at), style: { whiteSpace: "nowrap" } }, words);
}

// An expected moment. It may have passed if the work waits for its turn.
export const Due = ({ at }) => (at && Date.parse(at) <= Date.now() ? h("time", { dateTime: at, title: moment(at) }, "due") : h(Ago, { at }));

// ---- pieces

const COLOURS = {
  "bad spec": "red", unreachable: "red", losing: "red", stopped: "red", stalled: "orange", "catching up": "blue",
  "objective missed": "orange", unknown: "yellow", idle: "gray", "TAKEN OVER": "gray", growing: "orange", steady: "gray", slowing: "green", overdue: "orange",
  "run failed": "red", blocked: "red", "records failed": "orange", paused: "purple",
  replaying: "blue", "records wait": "yellow", running: "cyan", "not validated": "yellow", ok: "green", new: "gray",
  FAILED: "red", RUNNING: "cyan", COMMITTED: "green", WAITING: "yellow", HELD: "purple", LOADED: "green", SKIPPED: "gray",
  DISCARDED: "gray", "READ BESIDE": "blue", PLANNED: "blue", EXPIRED: "gray", REJECTED: "gray", APPLIED: "green", UNDONE: "purple",
  passed: "green", warning: "orange", critical: "red",
};

// Whether an attempt failed only because a newer one, or a rewind, took its partitions.
export const takenOver = (attempt) => attempt.error_kind === "fenced";

// The tone of a notice about a state.
export const toneOf = (value) => ({ red: "error", orange: "warning", yellow: "warning", green: "success" })[COLOURS[value]] ?? "info";

export const State = ({ value, title }) =>
  h(Badge, { colorPalette: COLOURS[value] ?? "gray", variant: "subtle", title, whiteSpace: "nowrap" }, value ?? "–");

export const A = ({ to: target, children, ...more }) =>
  h(Link, { asChild: true, color: "fg.info", overflowWrap: "anywhere", _hover: { textDecoration: "underline" }, ...more },
    h(RouterLink, { to: target }, children));

export const LinkButton = ({ to: target, children, ...more }) =>
  h(Button, { asChild: true, size: "sm", variant: "outline", ...more }, h(RouterLink, { to: target }, children));

// The heading of a view, with its state and links beside it.
export const Title = ({ text, children }) =>
  h(Flex, { gap: 3, align: "center", wrap: "wrap" }, h(Heading, { as: "h1", size: "xl", overflowWrap: "anywhere" }, text), children);

export const Muted = (props) => h(Text, { as: "span", color: "fg.muted", fontSize: "sm", fontWeight: "normal", ...props });

export const Section = ({ title, aside, children, id }) =>
  h(Box, { as: "section", mt: 6, id, minW: 0 },
    h(Flex, { align: "baseline", gap: 3, mb: 2, wrap: "wrap" }, h(Heading, { as: "h2", size: "md" }, title), aside),
    children);

// A text with its parts between backticks as code.
export const coded = (text) => text.split("`").map((part, index) => (index % 2 ? h(Code, { key: index, display: "inline", whiteSpace: "normal", overflowWrap: "anywhere" }, part) : part));

// A section whose content is rarely read. It is drawn when it is opened.
export function Folded({ title, aside, children }) {
  const [open, setOpen] = useState(false);
  return h(Box, { as: "details", mt: 6, minW: 0, onToggle: (event) => setOpen(event.currentTarget.open) },
    h(Box, { as: "summary", cursor: "pointer", w: "fit-content", maxW: "100%" }, h(Heading, { as: "h2", size: "md", display: "inline" }, title), aside && h(Muted, { ms: 3 }, aside)),
    h(Box, { mt: 2 }, open && children));
}

export const Notice = ({ tone = "info", title, children, role = "status" }) =>
  h(Box, { role, borderWidth: "1px", borderLeftWidth: "4px", borderColor: `border.${tone}`, bg: `bg.${tone}`, borderRadius: "md", p: 3, my: 3 },
    title && h(Text, { fontWeight: "semibold", color: `fg.${tone}`, overflowWrap: "anywhere" }, title),
    children && h(Box, { fontSize: "sm", overflowWrap: "anywhere" }, children));

export const Empty = ({ title, children }) =>
  h(Box, { borderWidth: "1px", borderStyle: "dashed", borderRadius: "md", p: 6, textAlign: "center" },
    h(Text, { fontWeight: "semibold" }, title), children && h(Text, { color: "fg.muted", fontSize: "sm", mt: 1 }, children));

// Below a list that has no older entries.
export const NewestOnly = ({ consumer }) => h(Muted, { display: "block", mt: 2 }, `Only the newest are shown${consumer ? "." : "; choose a consumer for its older ones."}`);

export const Banners = ({ banners }) =>
  (banners ?? []).map((banner) =>
    h(Notice, { key: banner.connection, tone: "error", role: "alert", title: `Database ${banner.connection} does not answer: ${banner.problem}` },
      `${banner.fix} Its consumers: ${banner.consumers.slice(0, 8).join(", ")}${banner.consumers.length > 8 ? ` and ${banner.consumers.length - 8} more` : ""}.`));

// Draws its children at the available width, so that a chart's text keeps its size on a phone.
export function Sized({ children, most = 4000 }) {
  const place = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  return h(Box, { ref: place, minW: 0 }, width > 0 && children(Math.min(most, width)));
}

// The query behind a table, for psql.
export const Query = ({ text }) => text ? h(Box, { as: "details", fontSize: "sm", mt: 2 }, h(Box, { as: "summary", cursor: "pointer", color: "fg.muted", w: "fit-content" }, "Query"),
  h(Box, { as: "pre", tabIndex: 0, fontSize: "xs", overflowX: "auto", p: 3, bg: "bg.muted", borderRadius: "md", mt: 1 }, text)) : null;

// A view's data, or a status while they are loading.
export function Loaded({ state, children }) {
  const { data, error } = state;
  if (!data && !error) return h(Flex, { align: "center", gap: 2, py: 8, role: "status" }, h(Spinner, { size: "sm" }), "Loading");
  return h(Fragment, null,
    error && h(Notice, { tone: data ? "warning" : "error", role: "alert", title: error.message }, data && "The last answer is shown."),
    data && children(data));
}

export const Facts = ({ rows }) =>
  h(Box, { as: "dl", display: "grid", gridTemplateColumns: { base: "7.5rem minmax(0, 1fr)", md: "max-content minmax(0, 1fr)" }, columnGap: { base: 2, md: 6 }, rowGap: 1, fontSize: "sm", mt: 1 },
    rows.filter(Boolean).map(([name, value]) => h(Fragment, { key: name },
      h(Box, { as: "dt", color: "fg.muted" }, name), h(Box, { as: "dd", minW: 0, overflowWrap: "anywhere" }, value))));

export const Field = ({ label, hint, children }) =>
  h(Box, { as: "label", display: "block", fontSize: "sm" },
    h(Text, { as: "span", display: "block", fontWeight: "medium" }, label), children,
    hint && h(Text, { as: "span", display: "block", color: "fg.muted", fontSize: "xs" }, hint));

export const Select = ({ value, onChange, options, label, ...more }) =>
  h(Box, { as: "select", value, "aria-label": label, onChange: (event) => onChange(event.target.value), borderWidth: "1px", borderRadius: "md",
    bg: "bg", color: "fg", px: 2, h: 8, fontSize: "sm", maxW: "100%", ...more },
    options.map(([key, words]) => h("option", { key, value: key }, words)));

export function ConsumerPicker({ value, onChange }) {
  const { data } = useData(api("groups"), { refresh: false });
  const names = (data?.groups ?? []).map((row) => row.consumer).sort();
  return h(Select, { label: "Consumer", value, onChange, options: [["", "All consumers"], ...[...new Set([...names, ...(value ? [value] : [])])].map((name) => [name, name])] });
}

// A value that lives in the address, so that a reload and a link keep it. It is written past the router: Airflow renders a page again
// whenever the router's address changes, and a field that is being typed into would lose its focus.
export function useParam(name, fallback = "") {
  const { key } = useLocation();
  const [value, setValue] = useState(() => inAddress(name) ?? fallback);
  useEffect(() => setValue(inAddress(name) ?? fallback), [key, name, fallback]);
  const set = useCallback((next) => {
    const address = new URL(globalThis.location.href);
    if (!next || next === fallback) address.searchParams.delete(name);
    else address.searchParams.set(name, next);
    globalThis.history.replaceState(globalThis.history.state, "", address);
    setValue(next || fallback);
  }, [name, fallback]);
  return [value, set];
}

const inAddress = (name) => new URLSearchParams(globalThis.location.search).get(name);

export const runPath = (row) => (row.dag_id && row.run_id ? `/dags/${encodeURIComponent(row.dag_id)}/runs/${encodeURIComponent(row.run_id)}` : null);

export function taskPath(row) {
  const run = runPath(row);
  if (!run || !row.task_id) return run;
  const mapped = row.map_index !== null && row.map_index >= 0 ? `/mapped/${row.map_index}` : "";
  return `${run}/tasks/${encodeURIComponent(row.task_id)}${mapped}${row.try_number ? `?try_number=${row.try_number}` : ""}`;
}

// Where the question of a task is answered.
export const questionPath = (row, task) => `${taskPath({ dag_id: row.dag_id, run_id: row.run_id, task_id: task, map_index: null, try_number: null })}/required_actions`;

export const RunLink = ({ row, children }) => {
  const path = runPath(row);
  return path ? h(A, { to: path }, children ?? row.run_id) : h(Muted, null, "command line");
};
