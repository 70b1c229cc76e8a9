// What is shown, as one flat object of strings, kept in TensorBoard's URL: #chopper&p.chopper.run=..&p.chopper.view=..

const PREFIX = "p.chopper.";
export const KEYS = ["run", "compare", "view", "worker", "span", "gpus", "steps", "by", "focus", "at"];
/** Views may bring keys of their own. */
export function addKeys(keys) {
  for (const key of keys) if (!KEYS.includes(key)) KEYS.push(key);
}

const STAYS = new Set(["run", "compare", "view"]);

let state = {};
const listeners = new Set();

function outer() {
  try {
    void window.parent.location.hash;
    return window.parent;
  } catch {
    return window; // framed by a page of another origin
  }
}

export function read(hash) {
  const found = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const cut = part.indexOf("=");
    if (cut < 0 || !part.startsWith(PREFIX)) continue;
    const key = part.slice(PREFIX.length, cut);
    if (!KEYS.includes(key)) continue;
    try {
      found[key] = decodeURIComponent(part.slice(cut + 1).replace(/\+/g, " "));
    } catch {
      // A half-encoded link: that part of it says nothing.
    }
  }
  return found;
}

function write(push) {
  const page = outer();
  const hash = page.location.hash;
  if (hash && !/^#chopper(&|$)/.test(hash)) return; // another tab is in front
  const kept = hash.replace(/^#/, "").split("&").filter((p) => p && p !== "chopper" && !p.startsWith(PREFIX));
  const own = KEYS.filter((k) => state[k]).map((k) => `${PREFIX}${k}=${encodeURIComponent(state[k])}`);
  const next = `#${["chopper", ...kept, ...own].join("&")}`;
  if (next === hash) return;
  if (push) page.history.pushState(page.history.state, "", next);
  else page.history.replaceState(page.history.state, "", next);
}

export const get = () => state;

/** Changes part of the state; null removes a key. Another run drops the selections that belong to the old one. */
export function set(change, { push = true } = {}) {
  const next = { ...state };
  if ("run" in change && change.run !== state.run) {
    for (const key of KEYS) if (!STAYS.has(key)) delete next[key];
  }
  if ("view" in change && change.view !== state.view) delete next.by;
  delete next.at; // a jump to a kernel ends with the next choice
  for (const [key, value] of Object.entries(change)) {
    if (value === null || value === undefined || value === "") delete next[key];
    else next[key] = String(value);
  }
  if (next.compare === next.run) delete next.compare;
  if (same(next, state)) return;
  state = next;
  write(push);
  listeners.forEach((f) => f(state));
}

const same = (a, b) => KEYS.every((k) => a[k] === b[k]);

/** Takes the state from the URL now and whenever the user goes back, forward, or edits it. */
export function start(listener) {
  listeners.add(listener);
  state = read(outer().location.hash);
  const follow = () => {
    const hash = outer().location.hash;
    if (!/^#chopper(&|$)/.test(hash)) return;
    const next = read(hash);
    if (!next.run && state.run) { write(false); return; } // the tab bar's own link carries no state
    if (same(next, state)) return;
    state = next;
    listeners.forEach((f) => f(state));
  };
  outer().addEventListener("hashchange", follow);
  outer().addEventListener("popstate", follow);
}
