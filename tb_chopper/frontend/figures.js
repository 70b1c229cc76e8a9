// Plotly figures from the backend, drawn when they come into sight, in the page's colours, resized with the page.
import { h, term } from "./dom.js";
import { onTheme, plotlyColors } from "./theme.js";

let plotly = null;

/** Loads Plotly once; its path carries the version, so that browsers keep it. */
export function loadPlotly(path) {
  plotly ??= new Promise((resolve, reject) => {
    const script = h("script", { src: path, onload: () => resolve(window.Plotly), onerror: () => reject(new Error("Plotly cannot be loaded")) });
    document.head.append(script);
  });
  return plotly;
}

const CONFIG = {
  displaylogo: false, responsive: false, showTips: false, scrollZoom: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

const live = new Set();

onTheme(() => live.forEach((f) => f.recolour()));

/** A figure with its title and description in HTML. `name` is its key in the view. */
export function figure(name, spec, path, onSelect) {
  const { title, meta = {}, ...layout } = spec.layout;
  const plot = h("div", { class: "plot", style: { height: `${layout.height ?? 360}px` }, role: "img", "aria-label": `${title?.text ?? name}. ${meta.description ?? ""}` });
  const element = h("figure", { class: meta.wide ? "figure wide" : "figure", "data-figure": name },
    h("figcaption", {}, h("h3", {}, plain(title?.text ?? name)), meta.description ? h("p", { class: "muted" }, meta.description) : null,
      legend(meta.legend)),
    plot);
  const drawn = new Drawn(plot, spec.data, layout, path, onSelect);
  drawn.watch();
  return { element, remove: () => drawn.remove() };
}

const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

// A legend in HTML wraps, is read by screen readers and never covers the drawing.
function legend(items) {
  if (!items?.length) return null;
  return h("ul", { class: "legend" }, items.map(({ label, color, definition, pattern, line }) =>
    h("li", {}, h("span", { class: `swatch${pattern ? " hatched" : ""}${line ? " line" : ""}`, style: { "--c": color } }), term(label, definition))));
}

class Drawn {
  constructor(plot, data, layout, path, onSelect) {
    Object.assign(this, { plot, data, layout, path, onSelect, width: 0, seen: false });
  }

  watch() {
    live.add(this);
    this.sight = new IntersectionObserver((entries) => {
      if (entries.some((e) => e.isIntersecting)) { this.seen = true; this.draw(); }
    }, { rootMargin: "200px" });
    this.sight.observe(this.plot);
    // A hidden TensorBoard tab has no size: drawing waits until it has one.
    this.size = new ResizeObserver(() => this.seen && this.draw());
    this.size.observe(this.plot);
  }

  async draw() {
    const width = this.plot.clientWidth;
    if (!width || width === this.width) return;
    const first = this.width === 0;
    this.width = width;
    try {
      const Plotly = await loadPlotly(this.path);
      if (!live.has(this)) return;
      const layout = { ...themed(this.layout), width, height: this.layout.height ?? 360 };
      await Plotly.react(this.plot, this.data, layout, CONFIG);
      if (first) this.plot.on("plotly_click", (event) => this.onSelect?.(event.points[0]));
      this.plot.dataset.drawn = "yes";
    } catch (error) {
      this.plot.textContent = `This figure cannot be drawn: ${error.message}`;
    }
  }

  recolour() {
    if (!this.width) return;
    this.width = 0;
    this.draw();
  }

  remove() {
    live.delete(this);
    this.sight.disconnect();
    this.size.disconnect();
    window.Plotly?.purge(this.plot);
  }
}

function themed(layout) {
  const c = plotlyColors();
  const axis = { gridcolor: c.line, linecolor: c.line, zerolinecolor: c.line, tickcolor: c.line, automargin: true, title: { standoff: 10 } };
  const out = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: c.text },
    hoverlabel: { bgcolor: c.strong, bordercolor: c.line, font: { color: c.panel, size: 12 }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: c.muted, activecolor: c.text },
    margin: { l: 8, r: 16, t: 8, b: 8, ...layout.margin },
    showlegend: false, // set in HTML: see legend()
  };
  for (const key of Object.keys(layout)) {
    if (/^[xy]axis\d*$/.test(key)) out[key] = { ...axis, ...layout[key], title: { ...axis.title, ...layout[key].title } };
  }
  if (layout.annotations) out.annotations = layout.annotations.map((a) => ({ ...a, font: { color: c.muted, ...a.font } }));
  return out;
}
