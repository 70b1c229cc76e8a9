// Small helpers to build the page. Strings become text nodes, never HTML.

/** An element: h("div", {class: "a", onclick: f, "aria-label": "x"}, "text", child, [more]). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([k, v]) => element.style.setProperty(k, v));
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replaces what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Text that explains another: underlined, reachable by keyboard, its definition shown on hover and focus. */
export function term(text, definition) {
  if (!definition) return h("span", {}, text);
  return h("button", { type: "button", class: "term", "data-tip": definition, "aria-label": `${text}: ${definition}` }, text);
}

/** A command with a button that copies it. */
export function command(text) {
  const button = h("button", { type: "button", class: "copy", "aria-label": `Copy the command ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    await copy(text);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return h("div", { class: "command" }, h("code", {}, text), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure context (http on another host) only the old way is there.
    const area = h("textarea", { style: { position: "fixed", opacity: 0 } });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Offers a file for download. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
