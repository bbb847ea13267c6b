// How values are shown.

import { now } from "./api";
import { t } from "./texts";
import type { Call } from "./types";

const UNITS: [number, string][] = [[864e5, "d"], [36e5, "h"], [6e4, "min"], [1000, "s"], [1, "ms"]];

export function duration(ms: number, exact = true): string {
  const [size, unit] = UNITS.find(([size]) => ms >= size) ?? UNITS[UNITS.length - 1];
  return `${exact && size > 1 ? (ms / size).toFixed(1) : Math.floor(ms / size)} ${unit}`;
}

export function ago(at: number, moment = now()): string {
  const passed = Math.max(0, moment - at);
  const calm = passed < 6e4 ? passed - (passed % 5000) : passed;
  return calm ? t.time.ago(duration(calm, false)) : t.time.now;
}

export function until(at: number, moment = now()): string {
  const left = at - moment;
  return left <= 0 ? t.time.over : t.time.in(duration(left, false));
}

const PREFIXES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
export function bytes(count: number): string {
  let unit = 0;
  while (count >= 1024 && unit < PREFIXES.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${PREFIXES[unit]}`;
}

export const percent = (share: number): string => `${Math.round(share)} %`;
// Made once: `toLocaleString` makes a formatter for each call.
const moments = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const clocks = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
export const moment = (at: number): string => moments.format(at);
export const clock = (at: number): string => clocks.format(at);
export const number = (value: number): string => value.toLocaleString("en-US");
export const money = (value: number): string => `$${value && value < 1 ? value.toFixed(4) : value.toFixed(2)}`;

/** Invisible and reordering characters by their code points, so that what is read is what runs. */
export const visibly = (text: string): string =>
  text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (one) => ("\n\t".includes(one) ? one : `\\u{${one.codePointAt(0)!.toString(16)}}`));

// Escape sequences of terminals: colours, titles, cursor moves.
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])/g;
/** Output of a command as plain text: without escape sequences; a line that is written over shows its last version. */
export const plain = (text: string): string =>
  visibly(text.replace(ESCAPES, "").replace(/\r+\n/g, "\n").replace(/[^\n]*\r(?=[^\n])/g, "").replace(/\r/g, ""));

const SAME_IN_EVERY_LINE = ["ts", "level", "message", "event", "component", "nodeId", "workspace", "pid"];
/** A line of a machine's log: the time, the level, the message and what else it says; any other line as it is. */
export function logLine(line: string): string {
  try {
    const entry = JSON.parse(line) as Record<string, unknown>;
    const at = Date.parse(String(entry.ts));
    if (Number.isNaN(at) || typeof entry.message !== "string") return line;
    const more = Object.entries(entry).filter(([name]) => !SAME_IN_EVERY_LINE.includes(name));
    const shown = more.map(([name, value]) => `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`);
    return `${moment(at)}  ${String(entry.level).padEnd(5)}  ${[entry.message, ...shown].join("  ")}`;
  } catch {
    return line;
  }
}

export const isOpen = ({ state }: { state: string }): boolean => state === "running" || state === "waiting";

/** What a call does, in a line: its command or path, not only its tool. */
export function subject(args: unknown): string {
  if (!args || typeof args !== "object") return "";
  const given = args as Record<string, unknown>;
  for (const name of ["command", "path", "file_path", "pattern", "query", "url", "message", "text", "source", "call", "action"]) {
    const value = given[name];
    if (typeof value === "string" && value) {
      const more = name === "source" && typeof given.destination === "string" ? ` → ${given.destination}` : "";
      return oneLine(value + more);
    }
  }
  const rest = Object.keys(given).length ? JSON.stringify(args) : "";
  return oneLine(rest);
}

const oneLine = (text: string): string => visibly(text.slice(0, 400)).replace(/\s+/g, " ").trim();

/** The name of a tool without its machine. */
export const toolName = (call: Pick<Call, "tool">): string => call.tool.split("__").slice(1).join("__") || call.tool;

export const LONGEST_SHOWN = 100_000;
export function pretty(value: unknown): string {
  const text = typeof value === "string" ? value : JSON.stringify(value, null, 2) ?? "";
  return text.length > LONGEST_SHOWN ? `${text.slice(0, LONGEST_SHOWN)}\n${t.common.more(text.length - LONGEST_SHOWN)}` : text;
}
