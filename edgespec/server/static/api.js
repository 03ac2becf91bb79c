// Talks to the server: JSON, server-sent events, and the API key, which lives as long as this tab.

const KEY = "edgespec.key";

export class ApiError extends Error {
  constructor(status, message, param = null, code = null) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

/** Keep the API key for this tab; without storage, for this page. */
let heldKey = "";
export function setKey(key) {
  heldKey = key;
  try { sessionStorage.setItem(KEY, key); } catch { /* storage is off */ }
}

export function getKey() {
  try { return sessionStorage.getItem(KEY) ?? heldKey; } catch { return heldKey; }
}

function headers(hasBody) {
  const key = getKey();
  return { ...(key && { Authorization: `Bearer ${key}` }), ...(hasBody && { "Content-Type": "application/json" }) };
}

async function send(path, body, signal) {
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(path, { method, headers: headers(body !== undefined), body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const problem = await response.json().then((value) => value.error, () => null);
  const message = problem?.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(response.status, message, problem?.param, problem?.code);
}

export async function get(path) {
  return (await send(path)).json();
}

/** The chunks of a streamed chat. Raises ApiError, also for an error inside the stream. */
export async function* chat(body, signal) {
  const response = await send("/v1/chat/completions", { ...body, stream: true, timings_per_token: true }, signal);
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.slice(event.indexOf("data:") + 5).trim();
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.status ?? 500, chunk.error.message, null, chunk.error.code);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new ApiError(0, "The connection was lost before the answer was complete.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ApiError(0, "The connection was lost before the answer was complete.");
}
