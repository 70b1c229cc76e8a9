// Follows TensorBoard's dark mode, live, and gives figures the same colours as the page.

const listeners = new Set();

function isDark() {
  try {
    return window.parent.document.body.classList.contains("dark-mode");
  } catch {
    return window.matchMedia("(prefers-color-scheme: dark)").matches;
  }
}

function apply() {
  const theme = isDark() ? "dark" : "light";
  if (document.documentElement.dataset.theme === theme) return;
  document.documentElement.dataset.theme = theme;
  listeners.forEach((f) => f(theme));
}

export const onTheme = (listener) => listeners.add(listener);

export function followTheme() {
  apply();
  try {
    new MutationObserver(apply).observe(window.parent.document.body, { attributes: true, attributeFilter: ["class"] });
  } catch {
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  }
}

/** Makes the colours of the backend's palette custom properties: --c-gemm, --c-idle, ... */
export function definePalette(colors) {
  for (const [name, color] of Object.entries(colors)) document.documentElement.style.setProperty(`--c-${name}`, color);
}

/** The page's colours as parts of a Plotly layout. */
export function plotlyColors() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  return { text: value("--text"), muted: value("--muted"), line: value("--line"), panel: value("--panel"), strong: value("--strong") };
}
