// A table of any length: only the rows in sight are in the page. Search, sort, CSV, keyboard.
import { download, fill, h } from "./dom.js";
import { cell, scale } from "./format.js";

const ROW_PX = 30;
const MAX_ROWS_IN_SIGHT = 16;
const MARGIN_ROWS = 8;
const FLUID_PX = 260;
const JUMP_PX = 26; // the button that shows a row in the trace

/** `onSelect(link)` gets {key of the selection: value} when a row is chosen. */
export function table(name, spec, { onSelect, selected, fileName } = {}) {
  return new TableView(name, spec, onSelect, selected, fileName).element;
}

class TableView {
  constructor(name, spec, onSelect, selected, fileName) {
    Object.assign(this, { name, spec, onSelect, selected: selected ?? {}, fileName: fileName ?? name, focused: 0 });
    this.columns = spec.columns.map((column, i) => this.prepare(column, spec.data[i]));
    this.count = spec.data[0]?.length ?? 0;
    this.order = Array.from({ length: this.count }, (_, i) => i);
    this.shown = this.order;
    this.build();
    const start = this.columns.findIndex((c) => c.name === spec.sort);
    if (start >= 0) this.sort(start, true);
    else this.filter();
  }

  prepare(column, values) {
    const numeric = values.some((v) => typeof v === "number") || (column.unit && column.unit !== "text");
    const sizes = numeric ? values.filter((v) => typeof v === "number" && v !== 0).map(Math.abs).sort((a, b) => a - b) : [];
    const largest = sizes.at(-1) ?? 0;
    // The unit suits the middle of the column: small rows stay readable beside one huge one.
    const middle = sizes[sizes.length >> 1] ?? 0;
    const { label: unitLabel, divisor } = scale(column.unit, Math.min(largest, 10 * middle));
    return { ...column, values, numeric, largest, unitLabel, divisor };
  }

  build() {
    const { spec } = this;
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": `Search in ${spec.title}`, oninput: () => this.filter() });
    this.status = h("span", { class: "muted", "aria-live": "polite" });
    const csv = h("button", { type: "button", class: "quiet", onclick: () => this.save(), "aria-label": `Download ${spec.title} as CSV` }, "CSV");
    this.heads = this.columns.map((column, i) => this.header(column, i));
    this.body = h("tbody");
    const widths = this.columns.map((c, i) => width(c, i === 0 && spec.at.length ? JUMP_PX : 0));
    const least = widths.reduce((sum, w) => sum + (w ?? FLUID_PX), 0);
    this.scroller = h("div", { class: "scroller", tabindex: "-1" },
      h("table", { style: { "min-width": `${least}px` }, "aria-rowcount": this.count, "aria-label": spec.title },
        h("colgroup", {}, widths.map((w) => h("col", { style: { width: w ? `${w}px` : "auto" } }))),
        h("thead", {}, h("tr", {}, this.heads)), this.body));
    this.scroller.addEventListener("scroll", () => this.schedule());
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-row]");
      if (row && event.target.closest(".to-trace")) this.onSelect?.({ at: this.spec.at[row.dataset.row] });
      else if (row) this.choose(Number(row.dataset.row));
    });
    this.element = h("section", { class: "table", "data-table": this.name },
      h("div", { class: "table-head" }, h("h3", {}, spec.title), this.status, h("span", { class: "spring" }), this.search, csv),
      spec.note ? h("p", { class: "muted note" }, spec.note) : null, this.scroller);
  }

  header(column, i) {
    const button = h("button", { type: "button", class: "sort", "data-tip": column.definition || null, onclick: () => this.sort(i) },
      h("span", {}, column.label), column.unitLabel ? h("span", { class: "unit" }, ` ${column.unitLabel}`) : null, h("span", { class: "arrow", "aria-hidden": "true" }));
    return h("th", { scope: "col", class: column.numeric ? "number" : "", "aria-sort": "none" }, button);
  }

  sort(i, descending) {
    const column = this.columns[i];
    const down = descending ?? (this.sorted === i ? !this.descending : column.numeric);
    [this.sorted, this.descending] = [i, down];
    const { values } = column;
    const sign = down ? -1 : 1;
    const compare = column.numeric ? (a, b) => a - b : (a, b) => COLLATOR.compare(a, b);
    // Missing values come last in both directions.
    this.order = Array.from({ length: this.count }, (_, k) => k).sort((a, b) => {
      const [x, y] = [values[a], values[b]];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return sign * compare(x, y) || a - b;
    });
    this.heads.forEach((head, k) => head.setAttribute("aria-sort", k !== i ? "none" : down ? "descending" : "ascending"));
    this.filter();
  }

  filter() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length === 0) this.shown = this.order;
    else {
      const texts = this.columns.filter((c) => !c.numeric);
      const matches = (i) => {
        const text = texts.map((c) => c.values[i] ?? "").join("\n").toLowerCase();
        return words.every((w) => text.includes(w));
      };
      this.shown = this.order.filter(matches);
    }
    this.focused = 0;
    this.scroller.scrollTop = 0;
    const n = this.shown.length;
    this.status.textContent = n === this.count ? `${n.toLocaleString("en")} row${n === 1 ? "" : "s"}` : `${n.toLocaleString("en")} of ${this.count.toLocaleString("en")}`;
    const rows = Math.min(Math.max(this.count, 1), MAX_ROWS_IN_SIGHT);
    this.scroller.style.height = `${(rows + 1) * ROW_PX + 14}px`;
    this.render();
  }

  schedule() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.render(); });
  }

  render() {
    const total = this.shown.length;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_PX) - MARGIN_ROWS);
    const last = Math.min(total, first + MAX_ROWS_IN_SIGHT + 2 * MARGIN_ROWS);
    const hadFocus = this.body.contains(document.activeElement);
    const rows = [];
    for (let place = first; place < last; place += 1) rows.push(this.row(place));
    if (total === 0) rows.push(h("tr", {}, h("td", { colspan: this.columns.length, class: "muted" }, this.count ? "Nothing matches." : "No rows.")));
    fill(this.body, spacer(first, this.columns.length), rows, spacer(total - last, this.columns.length));
    if (hadFocus) this.body.querySelector(`tr[data-place="${this.focused}"]`)?.focus({ preventScroll: true });
  }

  row(place) {
    const i = this.shown[place];
    const { link } = this.spec;
    const chosen = Object.entries(link).some(([key, column]) => this.selected[key] !== undefined && this.selected[key] === String(this.value(column, i)));
    return h("tr", {
      "data-row": i, "data-place": place, "aria-rowindex": place + 2, tabindex: place === this.focused ? "0" : "-1",
      class: [Object.keys(link).length ? "link" : "", chosen ? "chosen" : ""].join(" "),
    }, this.columns.map((c, k) => this.cell(c, i, k === 0 && this.spec.at[i])));
  }

  cell(column, i, at) {
    const value = column.values[i];
    const text = cell(value, column.unit, column.divisor);
    const jump = at ? h("button", { type: "button", class: "to-trace", title: "Show in trace (t)", "aria-label": `Show ${text} in the trace`, tabindex: "-1" }) : null;
    if (!column.numeric) return h("td", { title: text.length > 24 ? text : null }, jump, text);
    const style = column.bar && column.largest ? { "--w": `${Math.min(100, 100 * Math.max(0, value ?? 0) / (column.unit === "share" ? Math.max(1, column.largest) : column.largest))}%` } : {};
    return h("td", { class: column.bar ? "number share" : "number", style }, jump, text);
  }

  value(column, i) {
    return this.columns.find((c) => c.name === column)?.values[i];
  }

  choose(i) {
    const link = {};
    for (const [key, column] of Object.entries(this.spec.link)) {
      const value = this.value(column, i);
      if (value !== null && value !== undefined) link[key] = value;
    }
    if (Object.keys(link).length) this.onSelect?.(link);
  }

  key(event) {
    if (event.key === "t" && this.spec.at[this.shown[this.focused]]) this.onSelect?.({ at: this.spec.at[this.shown[this.focused]] });
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: MAX_ROWS_IN_SIGHT, PageUp: -MAX_ROWS_IN_SIGHT, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(this.shown[this.focused]);
    } else if (move !== undefined) {
      event.preventDefault();
      this.focused = Math.min(this.shown.length - 1, Math.max(0, this.focused + move));
      const top = this.focused * ROW_PX;
      const inside = this.scroller.clientHeight - 2 * ROW_PX;
      if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
      else if (top > this.scroller.scrollTop + inside) this.scroller.scrollTop = top - inside;
      this.render();
      this.body.querySelector(`tr[data-place="${this.focused}"]`)?.focus({ preventScroll: true });
    }
  }

  /** All columns and the shown rows in the shown order; raw numbers, the unit in the heading. */
  save() {
    const heading = this.columns.map((c) => (c.unit && !["text", "count", ""].includes(c.unit) && !c.name.endsWith(c.unit) ? `${c.name} [${c.unit}]` : c.name));
    const lines = [heading, ...this.shown.map((i) => this.columns.map((c) => c.values[i]))];
    download(`${this.fileName}.csv`, lines.map((line) => line.map(csvCell).join(",")).join("\r\n") + "\r\n", "text/csv;charset=utf-8");
  }
}

const COLLATOR = new Intl.Collator("en", { numeric: true });

// A text that a spreadsheet would take for a formula gets a quote before it.
export function csvCell(value) {
  if (value === null || value === undefined) return "";
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

const pen = document.createElement("canvas").getContext("2d");

function textWidth(text, weight) {
  pen.font = `${weight} 13px ${getComputedStyle(document.body).fontFamily}`;
  return pen.measureText(text).width;
}

// Pixels, or null for a column of long texts, which takes the room that is left.
function width(column, extra) {
  const heading = 38 + textWidth(`${column.label} ${column.unitLabel}`, 600);
  if (column.numeric) return Math.ceil(Math.max(84, heading));
  const longest = column.values.reduce((a, v) => (v !== null && String(v).length > a.length ? String(v) : a), "");
  return longest.length > 26 ? null : Math.ceil(Math.max(80, heading, 26 + extra + textWidth(longest, 400)));
}

function spacer(rows, columns) {
  return rows > 0 ? h("tr", { class: "spacer", "aria-hidden": "true", style: { height: `${rows * ROW_PX}px` } }, h("td", { colspan: columns })) : null;
}
