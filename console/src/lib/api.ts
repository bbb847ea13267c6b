// Requests to the gateway: the public HTTP interface, and nothing else. Addresses are relative to the page.

import { secret } from "./session";
import { t } from "./texts";

export class ApiError extends Error {
  constructor(
    message: string,
    /** The HTTP status; 0 if there was no answer. */
    readonly status: number,
    readonly code: string = "",
  ) {
    super(message);
  }
}

interface Options extends Omit<RequestInit, "body"> {
  json?: unknown;
  body?: BodyInit;
  /** Milliseconds until the request is given up; 0 for none. */
  patience?: number;
  /** Repeating the request with the same key does not repeat its effect. */
  key?: string;
}

let onUnauthorized: () => void = () => {};
export const whenUnauthorized = (act: () => void): void => void (onUnauthorized = act);

/** The difference between the gateway's clock and this one, in milliseconds. */
export let skew = 0;
export const now = (): number => Date.now() + skew;

export async function send(path: string, options: Options = {}): Promise<Response> {
  const { json, patience = 30_000, key, ...rest } = options;
  const headers = new Headers(rest.headers);
  const page = secret();
  if (page) headers.set("x-farhand-page", page);
  if (key) headers.set("idempotency-key", key);
  let body = rest.body;
  if (json !== undefined) {
    headers.set("content-type", "application/json");
    body = JSON.stringify(json);
  } else if (rest.method === "POST") {
    headers.set("content-type", "application/json");
    body ??= "{}";
  }
  const signal = rest.signal ?? (patience ? AbortSignal.timeout(patience) : undefined);
  let response: Response;
  try {
    response = await fetch(path, { ...rest, headers, body, signal });
  } catch (error) {
    if (rest.signal?.aborted) throw error;
    throw new ApiError(t.line.silent, 0);
  }
  const date = Date.parse(response.headers.get("date") ?? "");
  // The header has whole seconds.
  if (!Number.isNaN(date)) skew = Math.abs(date - Date.now()) > 2000 ? date - Date.now() : 0;
  if (response.ok || response.status === 304) return response;
  let message = t.line.answered(response.status);
  let code = "";
  try {
    const { error } = JSON.parse(await response.text());
    message = error.message ?? message;
    code = error.code ?? "";
  } catch {
    // not JSON: a proxy answered
  }
  if (response.status === 401) onUnauthorized();
  throw new ApiError(message, response.status, code);
}

/** Numbers that are too long for JavaScript stay as they were written. */
type Raw = { rawJSON?: (text: string) => unknown };
const exactly = (_: string, value: unknown, context?: { source?: string }): unknown => {
  const raw = (JSON as unknown as Raw).rawJSON;
  const source = context?.source;
  return typeof value === "number" && raw && source && String(value) !== source && !/[.eE]/.test(source) ? raw(source) : value;
};

// eslint-disable-next-line @typescript-eslint/no-explicit-any
export async function ask<T = any>(path: string, options?: Options): Promise<T> {
  return JSON.parse(await (await send(path, options)).text(), exactly as (key: string, value: unknown) => unknown);
}

export const post = <T = any>(path: string, json: unknown = {}, options: Options = {}): Promise<T> =>
  ask<T>(path, { method: "POST", json, ...options });

export const remove = <T = any>(path: string): Promise<T> => ask<T>(path, { method: "DELETE" });

export const newKey = (): string => crypto.getRandomValues(new Uint32Array(4)).join("-");

export const part = encodeURIComponent;

export function query(values: Record<string, string | number | undefined | null | false>): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== false);
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

export interface ServerEvent {
  id?: string;
  event?: string;
  data?: string;
}

/** Reads server-sent events until the stream ends. EventSource cannot send headers. */
export async function readEvents(response: Response, act: (event: ServerEvent) => void, alive: () => void = () => {}): Promise<void> {
  const pieces = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { done, value } = await pieces.read();
    if (done) return;
    alive();
    const blocks = (text + value).split("\n\n");
    text = blocks.pop()!;
    for (const block of blocks) {
      const fields: Record<string, string> = {};
      for (const row of block.split("\n")) {
        const colon = row.indexOf(":");
        if (colon > 0) fields[row.slice(0, colon)] = row.slice(colon + 1).replace(/^ /, "");
      }
      if (fields.event || fields.data) act(fields);
    }
  }
}

/** The message of an error, for people. */
export const reason = (error: unknown): string => (error instanceof Error ? error.message : String(error));
