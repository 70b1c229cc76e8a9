// The report's page: every view as its tab shows it, in the reader's theme, whole on paper.
// Everything is drawn at once: a printer never scrolls figures into sight.
window.IntersectionObserver = class {
  constructor(callback) { this.callback = callback; }
  observe() { this.callback([{ isIntersecting: true }]); }
  disconnect() {}
};

const [{ renderPage }, { h, fill }, { definePalette, followTheme }, { installTooltip }] = await Promise.all(
  ["page", "dom", "theme", "tooltip"].map((name) => import(`chopper/${name}.js`)));

const report = JSON.parse(document.getElementById("report").textContent);
const NO_SCRIPT = "data:text/javascript,"; // Plotly is in the page already

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const setDark = (on) => document.body.classList.toggle("dark-mode", on);
setDark(dark.matches);
dark.addEventListener("change", (event) => setDark(event.matches));
definePalette(report.colors);
followTheme();
installTooltip();

document.getElementById("theme").addEventListener("click", () => setDark(!document.body.classList.contains("dark-mode")));
for (const view of report.views) {
  const content = h("div", { class: "report-content" });
  document.getElementById("views").append(h("section", { class: "report-view", id: view.name }, h("h2", {}, view.title), content));
  renderPage(content, view, { plotly: NO_SCRIPT, state: { run: report.run, gpus: null }, onSelect: ({ view: to }) => { if (to) location.hash = to; } });
}
fill(document.getElementById("nav"), report.views.map((view) => h("a", { href: `#${view.name}` }, view.title)));

const plots = () => document.querySelectorAll(".js-plotly-plot");
const fit = () => plots().forEach((plot) => window.Plotly.relayout(plot, { width: plot.clientWidth }));
let wasDark = false;
window.addEventListener("beforeprint", () => {
  wasDark = document.body.classList.contains("dark-mode");
  setDark(false);
  document.documentElement.classList.add("printing");
  fit();
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  setDark(wasDark);
  fit();
});
document.documentElement.dataset.ready = "yes";
