// The console. It uses only the public HTTP interface, and inserts all content as text, never as markup.

const SHAPES = { running: "◐", waiting: "◷", ok: "✓", error: "✕", timeout: "◔", cancelled: "■", denied: "▲", unknown: "?", online: "●", offline: "○" };
const EVENTS = ["node.online", "node.offline", "node.changed", "node.forgotten", "call.started", "call.ended", "call.waiting",
  "approval.asked", "approval.approved", "approval.denied", "approval.expired", "approval.cancelled"];
const UNITS = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1000, "s"], [1, "ms"]];
const MOST_SHOWN = 100_000;

const $ = (id) => document.getElementById(id);
const say = (id, text) => ($(id).textContent = text);
const on = (id, kind, act) => $(id).addEventListener(kind, act);

// Building the page

function make(tag, kind = "", ...children) {
  const element = document.createElement(tag);
  element.className = kind;
  element.append(...children);
  return element;
}

function makeButton(kind, act, ...children) {
  return Object.assign(make("button", kind, ...children), { type: "button", onclick: act });
}

// One row per item: rows keep their focus and open details when the list is fetched again.
function rows(parent, key, build) {
  const known = new Map();
  return (items) => {
    const wanted = new Set(items.map((item) => item[key]));
    for (const [id, row] of known) {
      if (!wanted.has(id)) known.delete(id) && row.element.remove();
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
  element.replaceChildren(Object.assign(make("i", "", SHAPES[state] ?? "·"), { ariaHidden: true }), state);
  return element;
}

function span(ms, exact = true) {
  const [size, unit] = UNITS.find(([size]) => ms >= size) ?? UNITS.at(-1);
  return `${exact && size > 1 ? (ms / size).toFixed(1) : Math.floor(ms / size)} ${unit}`;
}

function setTime(element, at, running) {
  Object.assign(element.dataset, { at, running: running ?? "" });
  element.dateTime = new Date(at).toISOString();
  element.title = new Date(at).toLocaleString();
  tick(element);
  return element;
}

function tick(element) {
  const passed = Math.max(0, Date.now() - element.dataset.at);
  const calm = passed < 6e4 ? passed - (passed % 5000) : passed;
  const text = element.dataset.running ? span(passed, false) : calm ? `${span(calm, false)} ago` : "just now";
  if (element.textContent !== text) element.textContent = text;
}

setInterval(() => document.querySelectorAll("time").forEach(tick), 1000);

function pretty(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2);
  const more = text.length - MOST_SHOWN;
  const element = make("pre", "", text.slice(0, MOST_SHOWN), more > 0 ? `\n… ${more} more characters` : "");
  return Object.assign(element, { tabIndex: 0 });
}

// The page secret: the cookie alone is not accepted, since browsers send it to every port of the host. The secret
// arrives in the fragment after signing in; a new tab asks the other tabs of this origin for it.

const PLACE = `farhand ${location.pathname.replace(/[^/]*$/, "")}`;
const tabs = new BroadcastChannel(PLACE);
const given = new URLSearchParams(location.hash.slice(1)).get("page");
let asking;
if (given) {
  sessionStorage.setItem(PLACE, given);
  history.replaceState(null, "", location.pathname);
}
const secret = () => sessionStorage.getItem(PLACE);

tabs.onmessage = ({ data }) => {
  if (data.ask && secret()) tabs.postMessage({ secret: secret() });
  if (data.secret && asking) {
    sessionStorage.setItem(PLACE, data.secret);
    asking();
  }
};

function askTabs() {
  tabs.postMessage({ ask: true });
  return new Promise((done) => {
    asking = () => done((asking = null));
    setTimeout(() => asking?.(), 300);
  });
}

// Requests to the gateway

// Keep numbers that are too long for JavaScript as they were written.
const exactly = (_, value, context) =>
  typeof value === "number" && JSON.rawJSON && String(value) !== context.source ? JSON.rawJSON(context.source) : value;

async function send(path, { headers, ...options } = {}) {
  const mine = secret() ? { "x-farhand-page": secret() } : {};
  const response = await fetch(path, { signal: AbortSignal.timeout(20_000), ...options, headers: { ...mine, ...headers } });
  if (response.ok) return response;
  const { error } = JSON.parse(await response.text());
  throw Object.assign(new Error(error.message), { status: response.status });
}

const ask = async (path, options) => JSON.parse(await (await send(path, options)).text(), exactly);

// EventSource cannot send headers.
async function listen(line) {
  const response = await send("v1/events", { signal: line.signal });
  patience = 500;
  setLine("live", "Live");
  touch("nodes", "tools", "calls", "approvals");
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await pieces.read();
    if (done) throw new Error("the stream ended");
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) happened(Object.fromEntries(block.split("\n").map((row) => row.split(/: ?(.*)/s))));
  }
}

function happened({ event, data }) {
  if (!EVENTS.includes(event)) return;
  touch(...(event.startsWith("node") ? ["nodes", "tools"] : ["calls", "approvals"]));
  if (event === "call.ended" && JSON.parse(data).subject === watched?.request_id) follow();
}

let events, retry, patience = 500;

function setLine(line, text, trouble = "") {
  document.body.dataset.line = line;
  say("line", text);
  if ($("banner").textContent !== trouble) say("banner", trouble);
  $("banner").hidden = !trouble;
}

function signedIn(yes) {
  $("signed-in").hidden = !yes;
  $("signed-out").hidden = yes;
  $("sign-out").hidden = !yes || !secret();
}

on("sign-out", "click", async () => {
  await ask("v1/signout", { method: "POST", headers: { "content-type": "application/json" }, body: "{}" }).catch(() => null);
  sessionStorage.removeItem(PLACE);
  connect();
});

async function connect() {
  disconnect();
  try {
    if (!secret()) await askTabs();
    say("version", (await ask("v1/health")).version);
  } catch (error) {
    return handleFailure(error);
  }
  disconnect(); // another attempt may have connected in the meantime
  const line = (events = new AbortController());
  listen(line).catch(() => {
    if (events !== line) return;
    setLine("wait", "Connecting");
    later();
  });
}

function disconnect() {
  clearTimeout(retry);
  events?.abort();
  events = null;
}

function later() {
  disconnect();
  retry = setTimeout(connect, patience);
  patience = Math.min(patience * 2, 5000);
}

// Update the page after a failed request.
function handleFailure(error) {
  if (error.status === 401) {
    disconnect();
    signedIn(false);
    $("spent").hidden = !location.pathname.endsWith("/signin");
    return setLine("out", "Not signed in");
  }
  const trouble = error.status ? `The gateway refused the request: ${error.message}` : "The gateway does not answer";
  setLine("offline", "Offline", `${trouble}. This page may be out of date; it reconnects automatically.`);
  later();
}

// Stale lists are fetched together, never twice at once, and less often when fetching is slow.
const stale = new Set();
let fetching, pace = 120;

function touch(...lists) {
  for (const list of lists) stale.add(list);
  fetching ??= setTimeout(refresh, pace);
}

async function refresh() {
  const lists = [...stale];
  stale.clear();
  const began = performance.now();
  try {
    await Promise.all(lists.map(async (list) => show[list](await ask(`v1/${list}`))));
    signedIn(true);
  } catch (error) {
    handleFailure(error);
  }
  pace = Math.max(120, 3 * (performance.now() - began));
  fetching = null;
  if (stale.size) touch();
}

// Last-seen times change without an event, and a dead connection may send none.
setInterval(() => events && touch("nodes"), 15_000);
const comeBack = () => $("signed-out").hidden || connect();
window.addEventListener("focus", comeBack);
on("again", "click", comeBack);

// Nodes

const listNodes = rows($("nodes"), "node_id", () => {
  const state = make("span"), id = make("h3", "name"), name = make("p", "text"), about = make("p", "text");
  const seen = make("time"), count = make("summary"), names = make("p", "name");
  const head = make("div", "head", id, state), last = make("p", "", "Last seen ", seen);
  const element = make("li", "panel", head, name, about, last, make("details", "", count, names));
  const update = (node) => {
    setState(state, node.online ? "online" : "offline");
    id.textContent = node.node_id;
    name.textContent = node.name;
    name.hidden = node.name === node.node_id;
    about.textContent = [node.node_type, node.version, ...node.tags].filter(Boolean).join(" · ");
    setTime(seen, node.last_seen);
    count.textContent = `Tools: ${node.tools.length || "not listed"}`;
    names.textContent = node.tools.join(", ") || `Serves tools under ${node.capabilities.join(", ")}`;
  };
  return { element, update };
});

// Tools

let offers = [], chosen, watched;
const drafts = new Map();

const listTools = rows($("tools"), "name", (offer) => {
  const name = make("span", "name", offer.name), text = make("span", "text");
  const button = makeButton("", () => choose(offer), name, text);
  const update = (newest) => {
    offer = newest;
    text.textContent = text.title = offer.description || `on ${offer.host}`;
    button.ariaCurrent = chosen?.name === offer.name;
  };
  return { element: make("li", "", button), update };
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
  say("tools-count", query ? `${found.length} of ${offers.length}` : offers.length);
  // A node may serve tools that it does not list.
  say("by-name", `Call ${query} by name`);
  $("by-name").hidden = !query || offers.some((offer) => offer.name === query);
}

on("search", "input", find);
on("search", "keydown", (event) => {
  if (event.key === "Enter") ($("tools").querySelector("button") ?? $("by-name")).click();
});
on("by-name", "click", () => choose(named($("search").value.trim())));

// The required fields of a schema, with its defaults.
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

function parameter(name, schema, required) {
  const type = schema?.enum ? JSON.stringify(schema.enum) : [schema?.type ?? schema?.anyOf?.map((one) => one.type) ?? "any"].flat(2).join(" | ");
  const about = make("dd", "", make("small", "", type), ` ${schema?.description ?? ""}`);
  return [make("dt", "name", name, required?.includes(name) ? "" : "?"), about];
}

function choose(offer, args) {
  if (chosen) drafts.set(chosen.name, $("args").value);
  if (chosen?.name !== offer.name) {
    watched = null;
    $("outcome").replaceChildren();
  }
  chosen = offer;
  $("form").hidden = false;
  say("tool-name", offer.name);
  say("tool-text", offer.description.replace(/(.)\n(?=\w)/g, "$1 "));
  let fields = [], filled = "{}";
  try {
    const { properties, required } = offer.parameters;
    fields = Object.entries(properties ?? {}).flatMap(([name, schema]) => parameter(name, schema, required));
    filled = JSON.stringify(example(offer.parameters) ?? {}, null, 2);
  } catch {
    // an invalid schema: the node checks the arguments
  }
  $("parameters").replaceChildren(...fields);
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
    problem = `Invalid JSON: ${error.message}`;
  }
  $("args").ariaInvalid = Boolean(problem);
  say("problem", problem);
  return !problem;
}

on("args", "change", check);
on("form", "keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});

// Calls run in the background, so that a reload or the browser's connection limit does not end them, and have a key, so
// that a browser that repeats the request does not repeat the call.
on("form", "submit", async (event) => {
  event.preventDefault();
  if (!check()) return $("args").focus();
  const started = (watched = { state: "running", created_at: Date.now() });
  showOutcome();
  try {
    const answer = await ask("v1/tools/invoke", {
      method: "POST",
      headers: { "content-type": "application/json", "idempotency-key": crypto.getRandomValues(new Uint32Array(4)).join("-") },
      body: `{"tool":${JSON.stringify(chosen.name)},"args":${written()},"background":true}`,
    });
    if (watched !== started) return;
    watched = { ...started, ...answer };
    showOutcome();
    follow();
  } catch (error) {
    const text = error.status ? error.message : "No answer. The call may have run; see Calls when the gateway is back.";
    if (watched === started) $("outcome").replaceChildren(make("p", "bad text", text));
    if (!error.status || error.status === 401) handleFailure(error);
  }
});

async function follow() {
  const id = watched?.request_id;
  if (!id || !isOpen(watched)) return;
  // A new call may not be recorded yet; its next event fetches it again.
  const record = await ask(callPath(id)).catch(() => null);
  if (!record || watched?.request_id !== id || !isOpen(watched) || record.state === watched.state) return;
  watched = record;
  showOutcome();
}

function showOutcome() {
  const line = make("p", "row", setState(make("span"), watched.state), make("small", "", took(watched)));
  if (isOpen(watched) && watched.request_id) line.append(cancelButton(watched.request_id));
  $("outcome").replaceChildren(line, ...ending(watched));
}

// Approvals

// Show invisible and reordering characters by their code points, so that what is read is what runs.
const visibly = (text) =>
  text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => ("\n\t".includes(one) ? one : `\\u{${one.codePointAt(0).toString(16)}}`));
const DIFF = { "+": "ok", "-": "bad", "@": "soft" };
const diffLines = (text) => visibly(text).split(/(?<=\n)/).map((line) => make("span", DIFF[line[0]] ?? "", line));

const listApprovals = rows($("approvals"), "id", (one) => {
  const facts = {
    Rule: [one.rule, one.reason].filter(Boolean).join(": "), Until: new Date(one.deadline_at).toLocaleString(),
    "Asked by": `${one.credential}, from ${one.origins.join(" < ")}`, Session: one.session_key, Folder: one.cwd, Note: one.note,
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  const parts = {
    Command: one.command, Environment: Object.keys(one.env).length ? JSON.stringify(one.env, null, 2) : "", "Standard input": one.stdin,
    Arguments: one.command === null && !one.diff ? JSON.stringify(one.args, null, 2) : "",
  };
  const texts = Object.entries(parts).filter(([, text]) => text);
  const pre = (...children) => Object.assign(make("pre", "", ...children), { tabIndex: 0 });
  const problem = make("p", "bad text");
  const decide = async (decision) => {
    buttons.forEach((button) => (button.disabled = true));
    try {
      await ask(`v1/approvals/${encodeURIComponent(one.id)}`, {
        method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ decision, hash: one.hash }),
      });
    } catch (error) {
      problem.textContent = error.status ? error.message : "No answer. Check the list again before you decide.";
      buttons.forEach((button) => (button.disabled = false));
    }
    touch("approvals", "calls");
  };
  const buttons = [makeButton("primary", () => decide("approve"), "Approve"), makeButton("", () => decide("deny"), "Deny")];
  const element = make(
    "li", "panel",
    make("h3", "name", visibly(one.tool)), make("small", "name", one.id),
    make("dl", "", ...known.flatMap(([term, value]) => [make("dt", "", term), make("dd", "", visibly(value))])),
    ...texts.flatMap(([title, text]) => [make("h4", "", title), pre(visibly(text))]),
    ...(one.diff ? [make("h4", "", "Diff"), pre(...diffLines(one.diff))] : []),
    make("div", "row", ...buttons), problem,
  );
  return { element, update: () => {} };
});

// A list that just changed may have moved a button under the pointer: ignore clicks for a moment.
let listed = "";
function holdClicks(ids) {
  if (ids === listed) return;
  listed = ids;
  const buttons = [...$("approvals").querySelectorAll("button:enabled")];
  buttons.forEach((button) => (button.disabled = true));
  setTimeout(() => buttons.forEach((button) => (button.disabled = false)), 500);
}

// Calls

const isOpen = ({ state }) => state === "running" || state === "waiting";
const callPath = (id) => `v1/calls/${encodeURIComponent(id)}`;
const took = (record) =>
  isOpen(record) ? setTime(make("time"), record.created_at, true) : span(record.duration_ms ?? 0);

function ending({ state, error, result }) {
  if (error) return [make("p", "text", make("b", "bad", error.kind), ` ${error.message}`)];
  return state === "ok" ? [pretty(result)] : [];
}

function cancelButton(id) {
  const cancel = async ({ target }) => {
    target.disabled = true;
    await ask(callPath(id), { method: "DELETE" }).catch(() => (target.disabled = false));
    touch("calls");
  };
  return makeButton("stop", cancel, "Cancel");
}

const listCalls = rows($("calls"), "request_id", (record) => {
  const state = make("span"), time = make("span", "took soft");
  const name = make("span", "name", record.tool);
  const where = make("span", "name soft", record.route.node_id ?? "");
  const when = setTime(make("time", "soft"), record.created_at);
  const body = make("div", "body");
  const fill = () => body.replaceChildren(...(details.open ? callBody(record) : []));
  const details = make("details", "", make("summary", "", state, name, where, when, time), body);
  details.ontoggle = fill;
  const element = make("li", "", details);
  let shown;
  const update = (newest) => {
    record = newest;
    if (shown === record.state) return;
    shown = record.state;
    setState(state, shown);
    time.replaceChildren(took(record));
    element.querySelector(".stop")?.remove();
    if (isOpen(record)) element.append(cancelButton(record.request_id));
    fill();
  };
  return { element, update };
});

function callBody(record) {
  const { kind, node_id, capability } = record.route;
  const facts = {
    Call: record.request_id, Route: [kind, node_id, capability].filter(Boolean).join(" · "),
    Session: record.session_key, Agent: record.agent_id,
    Started: new Date(record.created_at).toLocaleString(),
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  const again = () => choose(named(record.tool), JSON.stringify(record.args ?? {}, null, 2));
  const end = ending(record);
  return [
    make("dl", "", ...known.flatMap(([term, value]) => [make("dt", "", term), make("dd", "", value)])),
    make("h4", "", "Arguments"), pretty(record.args),
    ...(end.length ? [make("h4", "", record.error ? "Error" : "Result"), ...end] : []),
    makeButton("", again, "Use again"),
  ];
}

const show = {
  nodes({ nodes }) {
    nodes.sort((one, other) => other.online - one.online);
    listNodes(nodes);
    say("nodes-count", `${nodes.filter((node) => node.online).length} of ${nodes.length} online`);
  },
  tools({ tools }) {
    offers = tools;
    find();
  },
  approvals({ approvals }) {
    approvals.sort((one, other) => one.asked_at - other.asked_at); // a new approval does not move the others
    listApprovals(approvals);
    holdClicks(approvals.map((one) => one.id).join());
    $("approvals-section").hidden = !approvals.length;
    say("approvals-count", approvals.length);
  },
  calls({ calls }) {
    listCalls(calls);
    const running = calls.filter((record) => record.state === "running").length;
    say("calls-count", running ? `${running} running` : "");
    follow();
  },
};

connect();
