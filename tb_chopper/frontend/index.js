// The tab: TensorBoard imports this module and calls render().
import * as api from "./api.js";
import { fill, h } from "./dom.js";
import { loadPlotly } from "./figures.js";
import * as model from "./model.js";
import { empty, renderPage, skeleton } from "./page.js";
import { renderBar, renderTabs } from "./selectors.js";
import { definePalette, followTheme } from "./theme.js";
import { installTooltip } from "./tooltip.js";
import { renderTrace, traceSection } from "./trace.js";

const POLL_MS = 10_000;
const HANDLER = "from torch_ext import chopper_trace_handler\n\nwith torch.profiler.profile(on_trace_ready=chopper_trace_handler(\"log/my_run\")) as prof:\n    ...";

const TRACE = { name: "trace", title: "Trace", question: "What ran when? The timeline, with counters, clocks and attribution", by: [], options: {} };

let config;
let listing = { generation: 0, runs: [], error: "" };
let offers = null;
let page = {};
let current = null; // AbortController of the view under way
let leave = () => {};
let shownSignature = "";

export async function render() {
  document.head.append(h("link", { rel: "stylesheet", href: "static/style.css" }), h("meta", { name: "viewport", content: "width=device-width" }));
  document.documentElement.lang = "en";
  document.title = "Chopper";
  followTheme();
  installTooltip();
  page = {
    bar: h("header", { class: "topbar", role: "toolbar", "aria-label": "What is shown" }),
    nav: h("nav", { class: "tabs", role: "tablist", "aria-label": "Views" }),
    progress: h("div", { class: "progress", role: "progressbar", "aria-label": "Loading", "aria-valuemin": 0, "aria-valuemax": 100, hidden: true }, h("div", { class: "done" }), h("span", { class: "doing" })),
    content: h("main", { id: "content", role: "tabpanel", tabindex: "-1" }, skeleton()),
    live: h("div", { class: "hidden-text", role: "status", "aria-live": "polite" }),
  };
  document.body.append(h("div", { class: "sticky" }, page.bar, page.nav, page.progress), page.content, traceSection(), page.live);
  try {
    [config, listing] = await Promise.all([api.config(), api.runs()]);
  } catch (error) {
    fill(page.content, empty("Chopper cannot start", [error.message]));
    return;
  }
  config.tabs = [...config.views, TRACE];
  definePalette(config.colors);
  model.addKeys(config.views.flatMap((v) => Object.keys(v.options)));
  model.start(show);
  loadPlotly(config.plotly).catch(() => {});
  show();
  setInterval(poll, POLL_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
}

/** New runs, new spans and changed files appear without a reload. */
async function poll() {
  if (document.hidden || !document.body.clientWidth) return;
  try {
    const next = await api.runs();
    if (next.generation === listing.generation) return;
    listing = next;
    const run = listing.runs.find((r) => r.name === model.get().run);
    if (!run || run.signature !== shownSignature) show();
    else bar();
  } catch {
    // TensorBoard is gone or busy: what is shown stays.
  }
}

function complete() {
  const state = model.get();
  const change = {};
  if (!config.tabs.some((v) => v.name === state.view)) change.view = config.views[0].name;
  if (!state.run && listing.runs.length) change.run = latest(listing.runs);
  if (Object.keys(change).length) model.set(change, { push: false });
  return Object.keys(change).length > 0;
}

const latest = (runs) => runs.reduce((a, b) => (b.modified_s > a.modified_s ? b : a)).name;

function bar() {
  renderBar(page.bar, { runs: listing.runs, offers: offers?.run === model.get().run ? offers.value : null, entry: config.tabs.find((v) => v.name === model.get().view) });
  renderTabs(page.nav, config.tabs);
}

async function show() {
  if (!config || complete()) return; // complete() calls show() again through the model
  current?.abort();
  const mine = (current = new AbortController());
  const state = model.get();
  bar();
  if (!listing.runs.length) return nothing();
  page.content.setAttribute("aria-busy", "true");
  const sameView = page.content.dataset.view === state.view && page.content.dataset.run === state.run;
  // Another selection of the same view keeps the old page until the new one is there: nothing jumps.
  const patience = setTimeout(() => { if (!sameView) { leave(); fill(page.content, skeleton()); } }, sameView ? 1e9 : 120);
  try {
    const trace = state.view === TRACE.name;
    const asked = [(trace ? api.trace : api.view)(state, mine.signal, progress)];
    if (offers?.run !== state.run || offers.signature !== signatureOf(state.run)) asked.push(api.selectors(state.run, mine.signal));
    const [answer, selectors] = await Promise.all(asked);
    if (mine.signal.aborted) return;
    clearTimeout(patience);
    if (selectors) offers = { run: state.run, signature: selectors.signature, value: selectors.value };
    shownSignature = answer.signature;
    bar();
    leave();
    leave = trace
      ? renderTrace(page.content, answer.value, { perfetto: config.perfetto, signal: mine.signal })
      : renderPage(page.content, answer.value, { plotly: config.plotly, state, onSelect: select });
    Object.assign(page.content.dataset, { view: state.view, run: state.run, ready: "yes" });
    page.live.textContent = page.content.querySelector(".headline").textContent;
    if (!sameView) window.scrollTo(0, 0);
  } catch (error) {
    if (mine.signal.aborted) return;
    clearTimeout(patience);
    leave();
    leave = () => {};
    fill(page.content, empty("This cannot be shown", [error.message]));
    Object.assign(page.content.dataset, { view: "", run: "" });
    page.live.textContent = error.message;
  } finally {
    if (current === mine) {
      page.content.removeAttribute("aria-busy");
      page.progress.hidden = true;
    }
  }
}

const signatureOf = (name) => listing.runs.find((r) => r.name === name)?.signature;

function select(link) {
  if (link.at !== undefined) return model.set({ view: TRACE.name, at: link.at });
  const { gpu, step, ...rest } = link;
  if (rest.view) return model.set({ ...rest, ...(gpu !== undefined && { gpus: gpu }), ...(step !== undefined && { steps: `${step}-${step}` }) });
  const state = model.get();
  const change = { ...rest };
  // A second click on the same row takes the selection back.
  if (gpu !== undefined) change.gpus = state.gpus === String(gpu) ? null : gpu;
  if (step !== undefined) change.steps = state.steps === `${step}-${step}` ? null : `${step}-${step}`;
  if (rest.focus !== undefined && state.focus === rest.focus) change.focus = null;
  return model.set(change);
}

function progress({ done, doing }) {
  page.progress.hidden = false;
  page.progress.setAttribute("aria-valuenow", Math.round(100 * done));
  page.progress.firstChild.style.width = `${Math.max(2, 100 * done)}%`;
  page.progress.lastChild.textContent = `${doing} · ${Math.round(100 * done)} %`;
}

function nothing() {
  leave();
  leave = () => {};
  page.content.removeAttribute("aria-busy");
  fill(page.content, empty("No traces yet", [
    listing.error || "No *.pt.trace.json or *.pt.trace.json.gz file lies below the log directory. A new one appears here within seconds.",
    "This handler of torch.profiler writes them:",
  ], HANDLER));
}
