// What costs time, one card each, the largest gain first: evidence, cause, remedy, and where it shows.
import { h, term } from "./dom.js";
import { quantity, unbroken } from "./format.js";

/** `onSelect(link)` gets the tab and the selection that show the evidence, or the kernel for the Trace tab. */
export function diagnosisCards(diagnoses, onSelect) {
  const largest = Math.max(0, ...diagnoses.map((d) => d.gain_ms ?? 0));
  return h("ol", { class: "diagnoses", "aria-label": "Diagnoses" }, diagnoses.map((d) => card(d, largest, onSelect)));
}

function card(d, largest, onSelect) {
  const gain = d.gain_ms === null ? null : quantity(1000 * d.gain_ms, "us");
  return h("li", { class: `diagnosis ${d.severity}`, "data-code": d.code },
    h("div", { class: "diagnosis-head" },
      h("h3", {}, d.title), h("span", { class: `badge ${d.severity}` }, d.severity), h("span", { class: "spring" }),
      gain ? h("span", { class: "gain", "data-gain-ms": d.gain_ms }, h("strong", {}, `${gain.text} ${gain.unit}`), " ", term("per step", `Estimated: ${d.gain_how}`)) : null),
    gain ? h("div", { class: "gain-bar", "aria-hidden": "true", style: { "--w": `${largest ? (100 * d.gain_ms) / largest : 0}%` } }) : null,
    h("p", {}, unbroken(d.message)),
    h("dl", { class: "evidence" }, d.evidence.map(([label, value, unit]) => {
      const shown = quantity(value, unit || "count");
      return h("div", {}, h("dt", {}, label), h("dd", {}, shown.text, shown.unit ? ` ${shown.unit}` : null));
    })),
    h("dl", { class: "advice" },
      d.cause ? [h("dt", {}, "Likely cause"), h("dd", {}, d.cause)] : null,
      d.remedy ? [h("dt", {}, "Remedy"), h("dd", {}, d.remedy)] : null),
    h("div", { class: "diagnosis-links" },
      d.view ? h("button", { type: "button", class: "quiet", onclick: () => onSelect({ view: d.view, ...d.selection }) }, `Show in ${d.view_title}`) : null,
      d.kernel ? h("button", { type: "button", class: "quiet", onclick: () => onSelect({ at: d.kernel }) }, h("span", { class: "to-trace", "aria-hidden": "true" }), "Show in Trace") : null));
}
