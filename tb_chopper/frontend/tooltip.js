// One tooltip for the page: any element with data-tip shows it on hover and on keyboard focus; Escape hides it.
import { h } from "./dom.js";

export function installTooltip() {
  const tip = h("div", { class: "tooltip", role: "tooltip", id: "tooltip", hidden: true });
  document.body.append(tip);
  let owner = null;

  function show(element) {
    owner = element;
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const at = element.getBoundingClientRect();
    const size = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - size.width - 8);
    const below = at.bottom + 6;
    const top = below + size.height > document.documentElement.clientHeight ? at.top - size.height - 6 : below;
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(4, top)}px`;
    element.setAttribute("aria-describedby", "tooltip");
  }

  function hide() {
    owner?.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  }

  const target = (event) => event.target.closest?.("[data-tip]");
  document.addEventListener("mouseover", (event) => { const e = target(event); if (e) show(e); else if (owner) hide(); });
  document.addEventListener("focusin", (event) => { const e = target(event); if (e) show(e); });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", hide, true);
}
