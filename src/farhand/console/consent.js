// The OAuth consent page. It shows what a client asks for to the signed-in owner, and sends the decision.

const $ = (id) => document.getElementById(id);
const BASE = location.pathname.replace(/oauth\/[^/]*$/, "");
// The same place and channel as the console's, so that a signed-in tab can share its page secret with this one.
const PLACE = `farhand ${BASE}`;
const tabs = new BroadcastChannel(PLACE);
const ABOUT = {
  "tools.read": "look: read files and search",
  "tools.write": "look and change: also write files",
  "tools.exec": "do everything: also run commands",
};

const given = new URLSearchParams(location.hash.slice(1)).get("page");
if (given) {
  sessionStorage.setItem(PLACE, given);
  history.replaceState(null, "", location.pathname + location.search);
}

let asking;
tabs.onmessage = ({ data }) => {
  if (data.ask && sessionStorage.getItem(PLACE)) tabs.postMessage({ secret: sessionStorage.getItem(PLACE) });
  if (data.secret && asking) {
    sessionStorage.setItem(PLACE, data.secret);
    asking();
  }
};

function askTabs() {
  return new Promise((done) => {
    const timer = setTimeout(done, 400);
    asking = () => {
      clearTimeout(timer);
      done();
    };
    tabs.postMessage({ ask: true });
  });
}

async function ask(path, options = {}) {
  const secret = sessionStorage.getItem(PLACE);
  const headers = { ...options.headers, ...(secret ? { "x-farhand-page": secret } : {}) };
  const answer = await fetch(BASE + path, { ...options, headers, cache: "no-store" });
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(body.error?.message ?? `status ${answer.status}`), { status: answer.status });
  return body;
}

function choice(kind, group, value, text, checked) {
  const input = Object.assign(document.createElement("input"), { type: kind, name: group, value, checked });
  const label = document.createElement("label");
  label.append(input, ` ${text}`);
  return label;
}

const chosen = (group) => [...document.querySelectorAll(`input[name=${group}]:checked`)].map((one) => one.value);

function describe() {
  const nodes = $("all").checked ? "all machines" : chosen("node").join(", ") || "no machine";
  const tools = $("any-tool").checked ? "every tool" : chosen("tool").join(", ") || "no tool";
  $("summary").textContent = `You give it ${chosen("scope")[0]} on ${nodes}, with ${tools}.`;
  $("nodes").hidden = $("all").checked;
  $("tools").hidden = $("any-tool").checked;
}

function show(asked) {
  $("name").textContent = asked.name;
  $("host").textContent = asked.redirect_host;
  $("client").textContent = asked.client_id;
  const last = asked.scopes.at(-1);
  $("scopes").replaceChildren(
    ...asked.scopes.map((scope) => choice("radio", "scope", scope, ABOUT[scope] ?? scope, scope === last)),
  );
  $("nodes").replaceChildren(
    ...asked.nodes.map((node) => choice("checkbox", "node", node.id, node.online ? node.id : `${node.id} (offline)`, true)),
  );
  const tools = [...new Set(asked.nodes.flatMap((node) => node.tools))].sort();
  $("tools").replaceChildren(...tools.map((tool) => choice("checkbox", "tool", tool, tool, true)));
  $("status").hidden = true;
  $("consent").hidden = false;
  describe();
}

// A request that is not valid is not answered by itself: a link to this page would lead to any registered address.
function refuse(asked) {
  $("status").textContent = `The program that asks for access made a mistake: ${asked.error}. Nothing was given.`;
  $("back").textContent = `Tell ${asked.redirect_host} about it`;
  $("back").href = asked.redirect;
  $("invalid").hidden = false;
}

async function decide(allow) {
  $("error").textContent = "";
  const body = { request: location.search.slice(1), allow };
  if (allow) {
    const expires = $("expires").value;
    Object.assign(body, {
      scope: chosen("scope")[0],
      nodes: $("all").checked ? null : chosen("node"),
      tools: $("any-tool").checked ? null : chosen("tool"),
      expires_seconds: expires ? Number(expires) : null,
    });
  }
  try {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const { redirect } = await ask("v1/oauth/consent", options);
    location.assign(redirect);
  } catch (error) {
    $("error").textContent = error.message;
  }
}

async function begin() {
  try {
    const asked = await ask(`v1/oauth/consent${location.search}`);
    if (asked.error) refuse(asked);
    else show(asked);
  } catch (error) {
    const out = error.status === 401;
    $("status").textContent = out ? "You are not signed in here." : error.message;
    $("sign-in").hidden = !out;
    $("next").value = `oauth/authorize${location.search}`;
  }
}

$("consent").addEventListener("change", describe);
$("consent").addEventListener("submit", (event) => {
  event.preventDefault();
  decide(true);
});
$("deny").addEventListener("click", () => decide(false));

if (!sessionStorage.getItem(PLACE)) await askTabs();
begin();
