// One view as a page: banners, findings, headline, key figures, main figure, tables, details.
import { diagnosisCards } from "./diagnosis.js";
import { command, fill, h, term } from "./dom.js";
import { figure } from "./figures.js";
import { quantity, unbroken } from "./format.js";
import { table } from "./table.js";

/** Fills `content` with a view. Returns a function that takes it away again. */
export function renderPage(content, view, { plotly, state, onSelect }) {
  const figures = Object.entries(view.figures).map(([name, spec]) => figure(name, spec, plotly, (point) => select(point, onSelect)));
  const tables = Object.entries(view.tables).map(([name, spec]) =>
    table(name, spec, { onSelect, selected: { ...state, gpu: state.gpus }, fileName: fileName(state, view.name, name) }));
  const [main, ...details] = figures.map((f) => f.element);
  const [first, ...others] = tables;
  const largest = Math.max(0, ...view.key_figures.filter((k) => k.unit === "us" && typeof k.value === "number").map((k) => Math.abs(k.value)));
  fill(content,
    view.banners.map((text) => h("p", { class: "banner", role: "note" }, text)),
    view.name === "findings" ? null : strip(view.findings),
    h("h2", { class: "headline" }, unbroken(view.headline)),
    view.key_figures.length ? h("dl", { class: "key-figures" }, view.key_figures.map((k) => keyFigure(k, largest))) : null,
    view.name === "findings" ? findingList(grouped(view.findings)) : null,
    view.diagnoses.length ? diagnosisCards(view.diagnoses, onSelect) : null,
    main, view.name === "overview" ? null : first, details.length ? h("div", { class: "grid" }, details) : null,
    view.name === "overview" ? first : null, others,
    view.missing.length ? missing(view.missing) : null,
    Object.keys(view.definitions).length ? definitions(view.definitions) : null,
  );
  return () => figures.forEach((f) => f.remove());
}

// A point of a figure may carry {link: {gpu: 2}} as its custom data's last entry.
function select(point, onSelect) {
  const last = Array.isArray(point.customdata) ? point.customdata[point.customdata.length - 1] : null;
  if (typeof last !== "string" || !last.startsWith("{")) return;
  onSelect(JSON.parse(last));
}

const fileName = (state, view, name) => `chopper_${state.run}_${view}_${name}`.replace(/[^\w.-]+/g, "_").slice(0, 120);

// All times of a view's key figures are in the unit of the largest.
function keyFigure(k, largest) {
  const { text, unit } = quantity(k.value, k.unit, k.unit === "us" ? largest : undefined);
  return h("div", { class: `key-figure source-${k.source}`, style: k.color ? { "--c": k.color } : {} },
    h("dt", {}, term(k.label, k.definition)),
    h("dd", { "data-label": k.label, "data-value": k.value === null ? "" : k.value },
      h("span", { class: "value" }, text), unit ? h("span", { class: "unit" }, ` ${unit}`) : null,
      h("span", { class: "source" }, k.source)),
    h("dd", { class: "muted small" }, k.note || "\u00a0"));
}

// The same statement about several files is one statement.
function grouped(findings) {
  const groups = new Map();
  for (const f of findings) {
    const key = `${f.severity}\n${f.code}\n${f.message}`;
    const group = groups.get(key) ?? { ...f, count: 0, files: [] };
    group.count += f.count;
    if (f.file) group.files.push(f.file);
    groups.set(key, group);
  }
  return [...groups.values()];
}

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

function strip(findings) {
  const serious = findings.filter((f) => f.severity !== "info");
  if (!serious.length) return null;
  const errors = serious.filter((f) => f.severity === "error").length;
  const summary = [errors ? plural(errors, "error") : null, serious.length - errors ? plural(serious.length - errors, "warning") : null].filter(Boolean).join(", ");
  const groups = grouped(serious);
  return h("details", { class: `findings ${errors ? "error" : "warning"}` },
    h("summary", {}, h("strong", {}, `Data quality: ${summary}. `), h("span", {}, groups[0].message)),
    findingList(groups));
}

const MAX_LISTED = 200; // the table of the Findings tab has all of them

function findingList(groups) {
  if (!groups.length) return null;
  return h("ul", { class: "finding-list" }, groups.slice(0, MAX_LISTED).map((f) => h("li", { class: f.severity },
    h("div", {}, h("span", { class: `badge ${f.severity}` }, f.severity), h("code", { class: "muted" }, f.code), f.count > 1 ? h("span", { class: "muted" }, ` · ${plural(f.count, "event")}`) : null),
    h("p", {}, f.message), f.files.length ? h("p", { class: "muted small" }, f.files.join(", ")) : null)));
}

function missing(items) {
  return h("section", { class: "missing" }, h("h3", {}, "Not in this run"),
    h("div", { class: "missing-items" }, items.map((m) => h("div", {}, h("h4", {}, m.what), h("p", {}, m.why), m.command ? command(m.command) : null))));
}

function definitions(entries) {
  return h("details", { class: "definitions" }, h("summary", {}, "Definitions"),
    h("p", { class: "muted small" }, "A number in a figure or table without a word for its source is measured: from the timestamps of this run."),
    h("dl", {}, Object.entries(entries).map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
}

/** The shape of a page while it loads, with the room that the page will take. */
export function skeleton() {
  return h("div", { class: "skeleton", "aria-hidden": "true" },
    h("div", { class: "bone line" }), h("div", { class: "bones" }, Array.from({ length: 5 }, () => h("div", { class: "bone card" }))), h("div", { class: "bone chart" }));
}

/** A page that says why there is nothing, and what to do. */
export function empty(title, lines, commandText) {
  return h("section", { class: "empty" }, h("h2", {}, title), lines.map((l) => h("p", {}, l)), commandText ? command(commandText) : null);
}
