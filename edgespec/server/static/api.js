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

const lost = () => new ApiError(0, "The connection was lost before the answer was complete.");

/** The server-sent events of a response, {type, data}, as the standard has them: comments, such as pings, are none. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isAfterReturn = false, type = "", data = [];
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const isSplit = isAfterReturn && value[0] === "\n"; // a line's end, \r\n, came in two parts
      const lines = (rest + (isSplit ? value.slice(1) : value)).split(/\r\n|\r|\n/);
      isAfterReturn = value.endsWith("\r");
      rest = lines.pop();
      for (const line of lines) {
        const [, field, text = ""] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
        if (field === "data") data.push(text);
        else if (field === "event") type = text;
        else if (!line) {
          if (data.length) yield { type, data: data.join("\n") };
          type = "";
          data = [];
        }
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? lost() : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

const STREAM = { timings_per_token: true, return_progress: true };

/** The chunks of a streamed chat. Raises ApiError, also for an error inside the stream. */
export async function* chat(body, signal) {
  const response = await send("/v1/chat/completions", { ...body, stream: true, ...STREAM }, signal);
  for await (const { type, data } of events(response)) {
    if (data === "[DONE]") return;
    if (!["", "message", "error"].includes(type)) continue;
    const chunk = parsed(data);
    const problem = chunk?.error ?? (type === "error" ? chunk ?? data : null);
    if (problem) throw new ApiError(problem.status ?? 500, problem.message ?? String(problem), null, problem.code);
    if (!chunk) throw new ApiError(500, `The server sent what is no part of an answer: ${data.slice(0, 100)}`);
    yield chunk;
  }
  throw lost();
}

/** The object of a text in JSON; null where it has none. */
function parsed(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}
