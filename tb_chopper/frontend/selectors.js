// The bar on top: run, run to compare with, worker, span, GPUs, steps, granularity.
import { fill, h } from "./dom.js";
import * as model from "./model.js";

/** Rebuilds the bar for the runs and for what the chosen run offers; the control in use keeps its focus. */
export function renderBar(bar, { runs, offers, entry }) {
  const focused = document.activeElement?.id;
  const state = model.get();
  fill(bar,
    h("span", { class: "brand" }, "Chopper"),
    field("run", "Run", choice("run", runs.map((r) => r.name), state.run)),
    field("compare", "Compare with", choice("compare", runs.map((r) => r.name).filter((n) => n !== state.run), state.compare, "none"), runs.length < 2),
    offers ? [
      offers.workers.length > 1 && offers.workers.length !== offers.gpus.length
        ? field("worker", "Worker", choice("worker", offers.workers, state.worker, "all")) : null,
      offers.spans.length > 1 ? field("span", "Span", choice("span", offers.spans, state.span, "all")) : null,
      offers.gpus.length ? field("gpus", offers.device === "cpu" ? "Processes" : "GPUs", gpuMenu(offers.gpus, state.gpus)) : null,
      offers.steps.length ? field("steps", "Steps", stepRange(offers.steps, state.steps)) : null,
    ] : null,
    entry?.by.length ? field("by", "By", choice("by", entry.by, state.by, entry.by[0], true)) : null,
    Object.entries(entry?.options ?? {}).map(([key, values]) => field(key, key[0].toUpperCase() + key.slice(1).replaceAll("_", " "), values.length ? choice(key, values, state[key], values[0], true) : textBox(key, state[key]))),
    state.focus ? h("button", { type: "button", class: "chip", title: state.focus, onclick: () => model.set({ focus: null }), "aria-label": `Stop looking at ${state.focus}` },
      h("span", {}, state.focus), " ✕") : null,
  );
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

function field(id, label, control, hidden = false) {
  if (hidden) return null;
  return h("div", { class: "field" }, h("label", { for: `select-${id}` }, label), control);
}

const NAMES = { gpu: "GPU", step: "Step", worker: "Worker", operation: "Operation", layer: "Layer", phase: "Phase", pattern: "Pattern", kernel: "Kernel", across: "Across steps", within: "Within steps", capture: "Capture", around: "Capture ± 5 s" };

const HINTS = { hardware: "peak_tflops=1307,f_peak_mhz=2100" };

// `empty`: what the choice is called that removes the key.
function choice(key, values, value, empty, emptyIsFirst = false) {
  const options = emptyIsFirst ? values : [...(empty ? [""] : []), ...values];
  const select = h("select", { id: `select-${key}`, onchange: () => model.set({ [key]: emptyIsFirst && select.value === empty ? null : select.value }) },
    options.map((v) => h("option", { value: v, selected: String(v) === String(value ?? (emptyIsFirst ? empty : "")) }, v === "" ? empty : NAMES[v] ?? String(v))));
  if (value && !options.map(String).includes(value)) {
    select.prepend(h("option", { value, selected: true }, `${value} (gone)`));
  }
  return select;
}

// An option without fixed values: applied on Enter or when left.
function textBox(key, value) {
  return h("input", { type: "text", id: `select-${key}`, class: "option-text", value: value ?? "", placeholder: HINTS[key] ?? "", spellcheck: "false", autocomplete: "off", title: HINTS[key] ?? "", onchange: (event) => model.set({ [key]: event.target.value.trim() || null }) });
}

function gpuMenu(gpus, value) {
  const chosen = new Set(value ? value.split(",").map(Number) : gpus);
  const text = !value ? `all ${gpus.length}` : gpus.filter((g) => chosen.has(g)).join(", ") || "none";
  const button = h("button", { type: "button", id: "select-gpus", class: "menu-button", "aria-expanded": "false", "aria-haspopup": "true" }, gpus.length === 1 ? String(gpus[0]) : text);
  if (gpus.length === 1) { button.disabled = true; return button; }
  const boxes = gpus.map((g) => h("label", {}, h("input", { type: "checkbox", value: g, checked: chosen.has(g) }), ` ${g}`));
  const apply = () => {
    const picked = boxes.map((b) => b.firstChild).filter((b) => b.checked).map((b) => Number(b.value));
    close();
    model.set({ gpus: picked.length === 0 || picked.length === gpus.length ? null : picked.join(",") });
  };
  const all = h("button", { type: "button", class: "quiet", onclick: () => { const on = boxes.some((b) => !b.firstChild.checked); boxes.forEach((b) => { b.firstChild.checked = on; }); } }, "All / none");
  const menu = h("div", { class: "menu", hidden: true, role: "group", "aria-label": "GPUs" },
    h("div", { class: "boxes" }, boxes), h("div", { class: "menu-end" }, all, h("button", { type: "button", class: "primary", onclick: apply }, "Apply")));
  const close = () => { menu.hidden = true; button.setAttribute("aria-expanded", "false"); };
  const wrap = h("div", { class: "menu-wrap" }, button, menu);
  button.addEventListener("click", () => {
    menu.hidden = !menu.hidden;
    button.setAttribute("aria-expanded", String(!menu.hidden));
    if (!menu.hidden) boxes[0].firstChild.focus();
  });
  wrap.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !menu.hidden) { close(); button.focus(); }
    if (event.key === "Enter" && event.target.type === "checkbox") apply();
  });
  wrap.addEventListener("focusout", (event) => { if (!wrap.contains(event.relatedTarget) && event.relatedTarget) close(); });
  return wrap;
}

function stepRange(steps, value) {
  const [low, high] = value ? value.split("-") : [steps[0], steps[steps.length - 1]];
  const bound = (which, initial) => h("select", { id: which === 0 ? "select-steps" : "select-steps-last", "aria-label": which === 0 ? "First step" : "Last step", onchange: apply },
    steps.map((s) => h("option", { value: s, selected: String(s) === String(initial) }, String(s))));
  const [first, last] = [bound(0, low), bound(1, high ?? low)];
  function apply(event) {
    let [a, b] = [Number(first.value), Number(last.value)];
    if (a > b) { if (event.target === first) b = a; else a = b; }
    model.set({ steps: a === steps[0] && b === steps[steps.length - 1] ? null : `${a}-${b}` });
  }
  return h("span", { class: "range" }, first, h("span", { "aria-hidden": "true" }, "–"), last);
}

/** The tabs inside the tab, as links in a list: arrow keys move, Enter opens. */
export function renderTabs(nav, views) {
  const current = model.get().view;
  if (nav.childElementCount !== views.length) {
    fill(nav, views.map((v) => h("button", { type: "button", role: "tab", id: `tab-${v.name}`, "data-view": v.name, "data-tip": v.question, "aria-controls": "content", onclick: () => model.set({ view: v.name }) }, v.title)));
    nav.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const tabs = [...nav.children];
      const next = tabs[(tabs.indexOf(document.activeElement) + move + tabs.length) % tabs.length];
      next.focus();
      next.click();
    });
  }
  for (const tab of nav.children) {
    const on = tab.dataset.view === current;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
  }
}
