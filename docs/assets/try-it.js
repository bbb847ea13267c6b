// Sends requests of the page of HTTP routes to a gateway of the reader. Answers are shown as text, never as markup.
// The address is kept for the tab; the token is kept in memory only.
"use strict";

(() => {
  const settings = document.getElementById("try-it-settings");
  if (!settings) return;
  const make = (name, properties, ...children) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...children);
    return element;
  };
  const field = (label, input) => make("label", {}, make("span", { textContent: label }), input);
  const address = make("input", { type: "url", value: sessionStorage.getItem("farhand-address") || "http://127.0.0.1:3210" });
  const token = make("input", { type: "password", autocomplete: "off", placeholder: "farhand token show" });
  address.addEventListener("change", () => sessionStorage.setItem("farhand-address", address.value));
  settings.append(field("Gateway", address), field("Token", token));

  async function send(operation, inputs, body, shown) {
    let path = operation.path;
    const query = new URLSearchParams();
    const headers = {};
    for (const [parameter, input] of inputs) {
      const value = input.value;
      if (parameter.in === "path") {
        const kept = path.includes(`{${parameter.name}...}`) ? value.split("/").map(encodeURIComponent).join("/") : encodeURIComponent(value);
        path = path.replace(`{${parameter.name}}`, kept).replace(`{${parameter.name}...}`, kept);
      } else if (value && parameter.in === "query") query.set(parameter.name, value);
      else if (value && parameter.in === "header") headers[parameter.name] = value;
    }
    if (token.value) headers.Authorization = `Bearer ${token.value.trim()}`;
    if (body) headers["Content-Type"] = operation.media || "application/json";
    const url = address.value.replace(/\/+$/, "") + path + (query.size ? `?${query}` : "");
    shown.textContent = `${operation.method} ${url}\n…`;
    const stop = new AbortController();
    const timer = setTimeout(() => stop.abort(), 30000);
    try {
      const answer = await fetch(url, { method: operation.method, headers, body: body ? body.value : undefined, signal: stop.signal });
      const text = await answer.text();
      let pretty = text;
      try { pretty = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: shown as it is */ }
      shown.textContent = `${answer.status} ${answer.statusText}\n${pretty.slice(0, 100000)}`;
    } catch (error) {
      shown.textContent = `No answer from ${url}: ${error.message}. Is the gateway running, and is ${location.origin} in [gateway] origins?`;
    } finally { clearTimeout(timer); }
  }

  for (const place of document.querySelectorAll(".try-it")) {
    const operation = JSON.parse(place.dataset.operation);
    const inputs = operation.parameters.map((parameter) => [parameter, make("input", { type: "text", required: parameter.required })]);
    const body = operation.media ? make("textarea", { value: operation.body, rows: 4, spellcheck: false }) : null;
    const shown = make("pre", { hidden: true });
    const form = make("form", {},
      ...inputs.map(([parameter, input]) => field(parameter.name, input)),
      ...(body ? [field("Body", body)] : []),
      make("button", { type: "submit", textContent: `Send ${operation.method}`, className: "md-button" }), shown);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      shown.hidden = false;
      send(operation, inputs, body, shown);
    });
    place.append(make("details", {}, make("summary", { textContent: "Try it" }), form));
  }
})();
