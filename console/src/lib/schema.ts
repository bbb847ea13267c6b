// Form fields from a JSON schema. What has no field of its own is edited as JSON.

import type { Schema } from "./types";

export type Kind = "text" | "long" | "number" | "integer" | "boolean" | "choice" | "json";

export interface Field {
  name: string;
  kind: Kind;
  required: boolean;
  description: string;
  choices: unknown[];
  fallback: unknown;
  schema: Schema;
}

const LONG = /^(command|content|text|message|stdin|patch|body|prompt|oldString|newString|old_string|new_string|script)$/;

function resolved(schema: Schema | undefined, root: Schema, depth = 0): Schema {
  if (!schema || depth > 8) return {};
  if (typeof schema.$ref === "string") {
    const found = schema.$ref.split("/").slice(1).reduce<unknown>((part, key) => (part as Record<string, unknown> | undefined)?.[key], root);
    return resolved(found as Schema, root, depth + 1);
  }
  const choices = (schema.anyOf ?? schema.oneOf)?.filter((one) => one.type !== "null");
  if (choices?.length === 1) return { ...resolved(choices[0], root, depth + 1), description: schema.description ?? choices[0].description, default: schema.default };
  return schema;
}

function kindOf(name: string, schema: Schema): Kind {
  if (schema.enum) return "choice";
  const types = [schema.type ?? "any"].flat().filter((one) => one !== "null");
  if (types.length !== 1) return "json";
  const [type] = types;
  if (type === "string") return LONG.test(name) ? "long" : "text";
  return type === "number" || type === "integer" || type === "boolean" ? type : "json";
}

export function fieldsOf(schema: Schema): Field[] {
  const required = Array.isArray(schema.required) ? schema.required : [];
  const fields = Object.entries(schema.properties ?? {}).map(([name, given]) => {
    const one = resolved(given, schema);
    return { name, kind: kindOf(name, one), required: required.includes(name), description: String(one.description ?? ""), choices: one.enum ?? [], fallback: one.default, schema: one };
  });
  return fields.sort((one, other) => Number(other.required) - Number(one.required));
}

/** The text in a field for a value. */
export function shown(field: Field, value: unknown): string | boolean {
  if (field.kind === "boolean") return Boolean(value ?? field.fallback ?? false);
  if (value === undefined || value === null) return "";
  if (field.kind === "json") return JSON.stringify(value, null, 2);
  return field.kind === "choice" ? JSON.stringify(value) : String(value);
}

/** The arguments of a form. Empty optional fields are left out. Throws for invalid JSON. */
export function collect(fields: Field[], values: Record<string, string | boolean>): Record<string, unknown> {
  const args: Record<string, unknown> = {};
  for (const field of fields) {
    const value = values[field.name];
    if (field.kind === "boolean") {
      if (field.required || value !== Boolean(field.fallback ?? false)) args[field.name] = value;
      continue;
    }
    if (value === undefined || value === "") {
      if (field.required) args[field.name] = field.kind === "text" || field.kind === "long" ? "" : null;
      continue;
    }
    if (field.kind === "number" || field.kind === "integer") args[field.name] = Number(value);
    else if (field.kind === "json" || field.kind === "choice") args[field.name] = JSON.parse(String(value));
    else args[field.name] = value;
  }
  return args;
}
