// The console. It speaks only the public HTTP interface, and puts other people's words on the page only as text.

const SHAPES = { running: "◐", ok: "✓", error: "✕", timeout: "◔", cancelled: "■", denied: "▲", unknown: "?", online: "●", offline: "○" };
const CHANGES = {
  "node.online": ["nodes", "tools"], "node.offline": ["nodes", "tools"], "node.changed": ["nodes", "tools"],
  "node.forgotten": ["nodes", "tools"], "call.started": ["calls"], "call.ended": ["calls"],
};
const MOST_SHOWN = 100_000;

const $ = (id) => document.getElementById(id);

// Building the page

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// Keeps one row for each item, so that what is open or in focus stays so when the list is fetched again.
function rows(parent, key, build) {
  const known = new Map();
  return (items) => {
    const wanted = new Set(items.map((item) => item[key]));
    for (const [id, row] of known) {
      if (wanted.has(id)) continue;
      row.element.remove();
      known.delete(id);
    }
    let place = parent.firstChild;
    for (const item of items) {
      if (!known.has(item[key])) known.set(item[key], build(item));
      const { element, update } = known.get(item[key]);
      update(item);
      if (element === place) place = place.nextSibling;
      else parent.insertBefore(element, place);
    }
  };
}

function setState(element, state) {
  element.className = `state ${state}`;
  element.replaceChildren(make("i", { "aria-hidden": "true" }, SHAPES[state] ?? "·"), state);
  return element;
}

function span(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 1) return `${Math.round(ms)} ms`;
  if (s < 60) return `${(ms / 1000).toFixed(1)} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function ago(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 5) return "just now";
  if (s < 60) return `${s - (s % 5)} s ago`;
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  return s < 86400 ? `${Math.floor(s / 3600)} h ago` : `${Math.floor(s / 86400)} d ago`;
}

let skew = 0; // the gateway's clock less ours

function setTime(element, at, running) {
  Object.assign(element.dataset, { at, running: running ?? "" });
  element.dateTime = new Date(at).toISOString();
  element.title = new Date(at).toLocaleString();
  tick(element);
  return element;
}

function tick(element) {
  const passed = Math.max(0, Date.now() + skew - element.dataset.at);
  const text = element.dataset.running ? span(passed - (passed % 1000)) : ago(passed);
  if (element.textContent !== text) element.textContent = text;
}

setInterval(() => document.querySelectorAll("time").forEach(tick), 1000);

function pretty(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2);
  const more = text.length - MOST_SHOWN;
  return make("pre", { tabindex: 0 }, more > 0 ? `${text.slice(0, MOST_SHOWN)}\n… ${more} more characters` : text);
}

// Talking to the gateway

class Refused extends Error {}

// Numbers too long for JavaScript are shown as they were written.
const exactly = (_, value, context) =>
  typeof value === "number" && JSON.rawJSON && String(value) !== context.source ? JSON.rawJSON(context.source) : value;

async function ask(path, options) {
  const response = await fetch(path, { signal: AbortSignal.timeout(20_000), ...options });
  const text = await response.text();
  const late = Date.parse(response.headers.get("date")) - Date.now();
  if (Math.abs(late - skew) > 2000) skew = late;
  let body;
  try {
    body = JSON.parse(text, exactly);
  } catch {
    body = {};
  }
  if (response.ok) return body;
  throw Object.assign(new Refused(body.error?.message ?? `status ${response.status}`), { status: response.status });
}

let events, retry;
let patience = 500;

function setLine(line, text, trouble = "") {
  document.body.dataset.line = line;
  $("line").textContent = text;
  if ($("banner").textContent !== trouble) $("banner").textContent = trouble;
  $("banner").hidden = !trouble;
}

function signedIn(yes) {
  $("signed-in").hidden = !yes;
  $("signed-out").hidden = yes;
}

async function connect() {
  disconnect();
  try {
    $("version").textContent = (await ask("/v1/health")).version;
  } catch (error) {
    stumble(error);
    return;
  }
  disconnect(); // another attempt may have come as far
  signedIn(true);
  events = new EventSource("/v1/events");
  events.onopen = () => {
    patience = 500;
    setLine("live", "Live");
    touch("nodes", "tools", "calls");
  };
  events.onerror = connect;
  for (const [kind, lists] of Object.entries(CHANGES)) {
    events.addEventListener(kind, (event) => {
      touch(...lists);
      if (kind === "call.ended" && JSON.parse(event.data).subject === watched?.request_id) follow();
    });
  }
}

function disconnect() {
  clearTimeout(retry);
  events?.close();
  events = null;
}

// What a failed request means for the whole page; then try again.
function stumble(error) {
  disconnect();
  if (error.status === 401) {
    setLine("out", "Not signed in");
    signedIn(false);
    $("spent").hidden = location.pathname !== "/signin";
    return;
  }
  const trouble = error instanceof Refused ? `The gateway refuses: ${error.message}` : "The gateway does not answer";
  setLine("offline", "Offline", `${trouble}. This page may be old; it goes on by itself.`);
  retry = setTimeout(connect, patience);
  patience = Math.min(patience * 2, 5000);
}

// Lists that may be out of date are fetched together, never twice at once, and less often when that is slow.
const stale = new Set();
let fetching;
let pace = 120;

function touch(...lists) {
  for (const list of lists) stale.add(list);
  fetching ??= setTimeout(refresh, pace);
}

async function refresh() {
  const lists = [...stale];
  stale.clear();
  const began = performance.now();
  try {
    await Promise.all(lists.map(async (list) => show[list](await ask(`/v1/${list}`))));
  } catch (error) {
    stumble(error);
  }
  pace = Math.max(120, 3 * (performance.now() - began));
  fetching = null;
  if (stale.size) touch();
}

// Last-seen times, and a line that went dead in silence, make no event.
setInterval(() => events && touch("nodes"), 15_000);
const comeBack = () => $("signed-out").hidden || connect();
window.addEventListener("focus", comeBack);
$("again").addEventListener("click", comeBack);

// Nodes

const listNodes = rows($("nodes"), "node_id", () => {
  const state = make("span"), id = make("h3", { class: "name" }), name = make("p", { class: "text" });
  const about = make("p", { class: "text" }), seen = make("time"), count = make("summary"), names = make("p", { class: "name" });
  const lends = make("details", null, count, names);
  const element = make("li", null, make("div", { class: "head" }, id, state), name, about, make("p", null, "Last seen ", seen), lends);
  const update = (node) => {
    const is = node.online ? "online" : "offline";
    element.className = `panel ${is}`;
    setState(state, is);
    id.textContent = node.node_id;
    name.textContent = node.name;
    name.hidden = node.name === node.node_id;
    about.textContent = [node.node_type, node.version, ...node.tags].filter(Boolean).join(" · ");
    setTime(seen, node.last_seen);
    count.textContent = `Tools: ${node.tools.length || "not listed"}`;
    names.textContent = node.tools.join(", ") || `Serves names below ${node.capabilities.join(", ")}`;
  };
  return { element, update };
});

// Tools

let offers = [];
let chosen, watched;
const drafts = new Map();

const listTools = rows($("tools"), "name", (offer) => {
  const name = make("span", { class: "name" }, offer.name), text = make("span", { class: "text" });
  const button = make("button", { type: "button", click: () => choose(offer) }, name, text);
  const update = (newest) => {
    offer = newest;
    text.textContent = text.title = offer.description || `on ${offer.host}`;
    button.setAttribute("aria-current", chosen?.name === offer.name);
  };
  return { element: make("li", null, button), update };
});

const named = (name) => offers.find((offer) => offer.name === name) ?? { name, description: "", parameters: {} };

function find() {
  const query = $("search").value.trim();
  const words = query.toLowerCase().split(/\s+/);
  const found = offers.filter(({ name, description, host }) => {
    const text = `${name} ${description} ${host}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  listTools(found);
  $("tools-count").textContent = query ? `${found.length} of ${offers.length}` : offers.length;
  $("no-tools").hidden = found.length > 0;
  // A node may serve names that it does not list.
  $("by-name").textContent = `Call ${query} by its name`;
  $("by-name").hidden = !query || offers.some((offer) => offer.name === query);
}

$("search").addEventListener("input", find);
$("search").addEventListener("keydown", (event) => {
  if (event.key === "Enter") ($("tools").querySelector("button") ?? $("by-name")).click();
});
$("by-name").addEventListener("click", () => choose(named($("search").value.trim())));

// What a schema asks for: its required fields, with the defaults it names.
function example(schema, root = schema, depth = 0) {
  if (!schema || depth > 8) return null;
  if (schema.$ref) {
    const keys = String(schema.$ref).split("/").slice(1);
    return example(keys.reduce((part, key) => part?.[key], root), root, depth + 1);
  }
  const given = [schema.default, schema.const, schema.enum?.[0], schema.examples?.[0]].find((value) => value !== undefined);
  if (given !== undefined) return given;
  const type = [schema.type].flat()[0] ?? (schema.properties && "object");
  if (type === "object") {
    return Object.fromEntries((schema.required ?? []).map((name) => [name, example(schema.properties?.[name], root, depth + 1)]));
  }
  const other = (schema.anyOf ?? schema.oneOf ?? schema.allOf)?.[0];
  if (other) return example(other, root, depth + 1);
  const number = schema.minimum ?? 0;
  return { string: "", integer: number, number, boolean: false, array: [] }[type] ?? null;
}

function typeName(schema) {
  const choices = schema?.enum?.map((value) => JSON.stringify(value)) ?? schema?.anyOf?.map(typeName);
  return (choices ?? [schema?.type ?? "any"].flat()).join(" | ");
}

function parameter([name, schema], required) {
  const about = make("dd", null, make("small", null, typeName(schema)), ` ${schema?.description ?? ""}`);
  return [make("dt", { class: "name" }, name, required?.includes(name) ? "" : "?"), about];
}

function choose(offer, args) {
  if (chosen) drafts.set(chosen.name, $("args").value);
  if (chosen?.name !== offer.name) {
    watched = null;
    $("outcome").replaceChildren();
  }
  chosen = offer;
  $("no-choice").hidden = true;
  $("form").hidden = false;
  $("tool-name").textContent = offer.name;
  $("tool-text").textContent = offer.description;
  const schema = offer.parameters;
  $("parameters").replaceChildren(...Object.entries(schema.properties ?? {}).flatMap((field) => parameter(field, schema.required)));
  let filled = "{}";
  try {
    filled = JSON.stringify(example(schema) ?? {}, null, 2);
  } catch {
    // a schema that is none: the node decides
  }
  $("args").value = args ?? drafts.get(offer.name) ?? filled;
  check();
  find();
  $("args").focus({ preventScroll: true });
  $("bench").scrollIntoView({ block: "nearest" });
}

const written = () => $("args").value.trim() || "{}";

function check() {
  let problem = "";
  try {
    JSON.parse(written());
  } catch (error) {
    problem = `Not JSON: ${error.message}`;
  }
  $("args").setAttribute("aria-invalid", Boolean(problem));
  $("problem").textContent = problem;
  return !problem;
}

$("args").addEventListener("change", check);
$("form").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});

// In the background: neither a reload nor the browser's few connections can end a call. The key is one for each press
// of the button: a browser that sends the request again does not run the call again.
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (!check()) return $("args").focus();
  const seconds = Number($("limit").value);
  const limit = seconds > 0 ? `,"timeout_ms":${Math.ceil(seconds * 1000)}` : "";
  const started = (watched = { state: "running", created_at: Date.now() + skew });
  showOutcome();
  try {
    const answer = await ask("/v1/tools/invoke", {
      method: "POST",
      headers: { "content-type": "application/json", "idempotency-key": crypto.getRandomValues(new Uint32Array(4)).join("-") },
      body: `{"tool":${JSON.stringify(chosen.name)},"args":${written()},"background":true${limit}}`,
    });
    if (watched !== started) return;
    watched = { ...started, ...answer };
    showOutcome();
    follow();
  } catch (error) {
    const refused = error instanceof Refused;
    const text = refused ? error.message : "No answer came. The call may have run: see Calls once the gateway is back.";
    if (watched === started) $("outcome").replaceChildren(make("p", { class: "bad text" }, text));
    if (!refused || error.status === 401) stumble(error);
  }
});

async function follow() {
  const id = watched?.request_id;
  if (!id || watched.state !== "running") return;
  // A call just begun may not be written yet; then its next event asks again.
  const record = await ask(callPath(id)).catch(() => null);
  if (!record || watched?.request_id !== id || watched.state !== "running" || record.state === "running") return;
  watched = record;
  showOutcome();
}

function showOutcome() {
  const line = make("p", { class: "row" }, setState(make("span"), watched.state), make("small", null, took(watched)));
  if (watched.state === "running" && watched.request_id) line.append(cancelButton(watched.request_id));
  $("outcome").replaceChildren(line, ...ending(watched));
}

// Calls

const callPath = (id) => `/v1/calls/${encodeURIComponent(id)}`;
const took = (record) =>
  record.state === "running" ? setTime(make("time"), record.created_at, true) : span(record.duration_ms ?? 0);

function ending({ state, error, result }) {
  if (error) return [make("p", { class: "text" }, make("b", { class: "bad" }, error.kind), ` ${error.message}`)];
  return state === "ok" ? [pretty(result)] : [];
}

function cancelButton(id) {
  const button = make("button", { type: "button", class: "stop" }, "Cancel");
  button.addEventListener("click", async () => {
    button.disabled = true;
    await ask(callPath(id), { method: "DELETE" }).catch(stumble);
    button.disabled = false;
    touch("calls");
    follow();
  });
  return button;
}

const listCalls = rows($("calls"), "request_id", (record) => {
  const state = make("span"), time = make("span", { class: "took soft" });
  const name = make("span", { class: "name call" }, record.tool), when = setTime(make("time", { class: "soft when" }), record.created_at);
  const where = make("span", { class: "name soft where" }, record.route.node_id ?? "");
  const body = make("div", { class: "body" });
  const fill = () => body.replaceChildren(...(details.open ? callBody(record) : []));
  const details = make("details", { toggle: fill }, make("summary", null, state, name, where, when, time), body);
  const element = make("li", null, details);
  let shown;
  const update = (newest) => {
    record = newest;
    if (shown === record.state) return;
    shown = record.state;
    setState(state, shown);
    time.replaceChildren(took(record));
    element.replaceChildren(details, ...(shown === "running" ? [cancelButton(record.request_id)] : []));
    fill();
  };
  return { element, update };
});

function callBody(record) {
  const { kind, node_id, capability } = record.route;
  const facts = {
    Call: record.request_id, Route: [kind, node_id, capability].filter(Boolean).join(" · "),
    Session: record.session_key, Agent: record.agent_id,
    Started: new Date(record.created_at).toLocaleString(), Deadline: new Date(record.deadline_at).toLocaleString(),
  };
  const terms = Object.entries(facts).flatMap(([term, value]) => (value ? [make("dt", null, term), make("dd", null, value)] : []));
  const again = () => choose(named(record.tool), JSON.stringify(record.args ?? {}, null, 2));
  const end = ending(record);
  return [
    make("dl", null, ...terms),
    make("h4", null, "Arguments"), pretty(record.args),
    ...(end.length ? [make("h4", null, record.error ? "Error" : "Result"), ...end] : []),
    make("button", { type: "button", click: again }, "Use again"),
  ];
}

const show = {
  nodes({ nodes }) {
    nodes.sort((one, other) => other.online - one.online);
    listNodes(nodes);
    $("nodes-count").textContent = `${nodes.filter((node) => node.online).length} of ${nodes.length} online`;
    $("no-nodes").hidden = nodes.length > 0;
  },
  tools({ tools }) {
    offers = tools;
    find();
  },
  calls({ calls }) {
    listCalls(calls);
    const running = calls.filter((record) => record.state === "running").length;
    $("calls-count").textContent = running ? `${running} running` : "";
    $("calls").hidden = !calls.length;
    $("no-calls").hidden = calls.length > 0;
    follow();
  },
};

connect();
