// The reference of the HTTP interface: shows /v1/openapi.json. All content is inserted as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);

function make(name, text, ...children) {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
}

function table(head, rows) {
  const body = rows.map((cells) => make("tr", "", ...cells.map((cell) => make("td", cell))));
  return make("table", "", make("tr", "", ...head.map((cell) => make("th", cell))), ...body);
}

function example(schema, known, depth = 0) {
  // An example value of a schema, with type names in place of values.
  if (!schema || depth > 6) return "…";
  if (schema.$ref) return example(known[schema.$ref.split("/").pop()], known, depth + 1);
  const choice = schema.anyOf || schema.oneOf;
  if (choice) {
    const shown = choice.map((one) => example(one, known, depth + 1));
    return shown.every((one) => typeof one === "string") ? shown.join(" | ") : shown[0];
  }
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.type === "array") return [example(schema.items, known, depth + 1)];
  if (schema.properties) {
    const shown = {};
    for (const [name, value] of Object.entries(schema.properties)) {
      shown[(schema.required || []).includes(name) ? name : `${name}?`] = example(value, known, depth + 1);
    }
    return shown;
  }
  return schema.type || "any";
}

function shape(title, content, known) {
  return Object.entries(content || {}).flatMap(([media, { schema }]) => [
    make("p", `${title} (${media})`),
    ...(schema ? [make("pre", JSON.stringify(example(schema, known), null, 2))] : []),
  ]);
}

function operation(method, path, about, known) {
  const line = make("summary", "", make("code", method.toUpperCase()), " ", make("code", path), ` — ${about.summary}`);
  line.firstChild.className = "method";
  const inside = make("div");
  if (about.description) inside.append(make("p", about.description));
  if (about.parameters) {
    const rows = about.parameters.map((one) => [one.name, one.in, String(example(one.schema, known)), one.description || ""]);
    inside.append(table(["parameter", "in", "type", ""], rows));
  }
  if (about.requestBody) inside.append(...shape("Body", about.requestBody.content, known));
  for (const [status, answer] of Object.entries(about.responses)) {
    if (status < 400) inside.append(...shape(`${status} ${answer.description}`, answer.content, known));
  }
  const errors = Object.entries(about.responses).filter(([status]) => status >= 400);
  inside.append(make("p", `Errors: ${errors.map(([status, answer]) => `${status} ${answer.description}`).join(", ")}`));
  const element = make("details", "", line, inside);
  element.dataset.words = `${method} ${path} ${about.summary}`.toLowerCase();
  return element;
}

async function show() {
  const described = await (await fetch("v1/openapi.json")).json();
  $("version").textContent = described.info.version;
  $("description").textContent = described.info.description;
  const groups = new Map();
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operation(method, path, about, described.components.schemas));
    }
  }
  for (const [tag, elements] of [...groups].sort()) $("routes").append(make("section", "", make("h2", tag), ...elements));
}

$("filter").addEventListener("input", () => {
  const wanted = $("filter").value.toLowerCase();
  for (const section of document.querySelectorAll("section")) {
    for (const element of section.querySelectorAll("details")) element.hidden = !element.dataset.words.includes(wanted);
    section.hidden = !section.querySelector("details:not([hidden])");
  }
});

show().catch((error) => $("routes").append(make("p", `Cannot load the description: ${error.message}`)));
