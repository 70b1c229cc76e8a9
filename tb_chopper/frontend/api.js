// The plugin's routes. Every error is one line of text made for a person.

async function getJson(path, parameters = {}, signal) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, v]) => v !== undefined && v !== null && v !== ""));
  const text = query.toString();
  let reply;
  try {
    reply = await fetch(text ? `${path}?${text}` : path, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("TensorBoard does not answer. Is it still running?");
  }
  if (!reply.ok) throw Object.assign(new Error(clean(await reply.text())), { status: reply.status });
  return reply.json();
}

/** An augmented trace as it is, gzipped. */
export async function traceBuffer(file) {
  const reply = await fetch(traceFile(file));
  if (!reply.ok) throw new Error(clean(await reply.text()));
  return reply.arrayBuffer();
}

const clean = (text) => text.replace(/^(Not found|Invalid argument): /, "").trim().slice(0, 1000) || "No answer";

export const config = () => getJson("config");
export const runs = (rescan = false) => getJson("runs", rescan ? { rescan: 1 } : {});

/** Asks until the answer is ready; `onProgress({done, doing, elapsed_s})` meanwhile. */
async function ask(path, parameters, signal, onProgress) {
  for (;;) {
    const answer = await getJson(path, parameters, signal);
    if (answer.state === "ready") return answer;
    onProgress?.(answer);
    await new Promise((resolve) => setTimeout(resolve, 100)); // the server itself waits up to a second
    signal?.throwIfAborted();
  }
}

export const selectors = (run, signal, onProgress) => ask("selectors", { run }, signal, onProgress);
export const trace = (state, signal, onProgress) => ask("trace", state, signal, onProgress);
export const traceFile = (file) => `trace_file?${new URLSearchParams({ file })}`;
export const view = (state, signal, onProgress) => ask("view", state, signal, onProgress);
