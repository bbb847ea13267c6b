// The one stream of events, and what every screen shares: the state of the connection, machines, approvals.

import { ApiError, ask, reason, whenUnauthorized } from "./api";
import { askTabs, forget, secret, wantSecret, whenSignedInElsewhere } from "./session";
import { follow, nameOf } from "./stream";
import type { Approval, Health, JournalEvent, NodeInfo } from "./types";

type Line = "connecting" | "live" | "offline" | "out";

// What is fetched is replaced as a whole: watching each field of ten thousand machines would take seconds.
class Live {
  line = $state<Line>("connecting");
  trouble = $state("");
  /** Whether this page was signed in before; then what was typed is kept when the session ends. */
  wasIn = $state(false);
  health = $state.raw<Health | null>(null);
  nodes = $state.raw<NodeInfo[] | null>(null);
  primary = $state<string | null>(null);
  approvals = $state.raw<Approval[]>([]);
  /** Counts reconnections, so that resources are fetched again. */
  connections = $state(0);
}
export const live = new Live();

type Listener = (event: JournalEvent) => void;
const listeners = new Set<Listener>();

/** Calls `act` for every event; returns how to stop. */
export function onEvent(act: Listener): () => void {
  listeners.add(act);
  return () => void listeners.delete(act);
}

let stop: (() => void) | null = null;
let retry = 0;
let patience = 500;
let lastId = "";
let heard = 0;
// A page that slept longer than this reloads instead of reading everything it missed.
const LONG_AGO = 10 * 60_000;
// The gateway sends something at least this often.
const SILENCE = 60_000;

function opened(): void {
  heard = Date.now();
  patience = 500;
  live.line = "live";
  live.trouble = "";
  live.wasIn = true;
  live.connections += 1;
  touch("nodes", "approvals", "health");
}

function happened(event: JournalEvent): void {
  if (event.kind.startsWith("node.")) touch("nodes");
  if (event.kind.startsWith("approval.") || event.kind === "call.waiting") touch("approvals");
  if (event.kind.startsWith("freeze") || event.kind.startsWith("gateway.")) touch("health");
  for (const act of listeners) act(event);
}

export async function connect(): Promise<void> {
  disconnect();
  wantSecret(false);
  try {
    if (!secret()) await askTabs();
    live.health = await ask<Health>("v1/health");
  } catch (error) {
    return failed(error);
  }
  disconnect(); // another attempt may have connected in the meantime
  if (Date.now() - heard > LONG_AGO) lastId = "";
  stop = follow(nameOf(location.pathname, secret()), () => lastId, {
    opened,
    event({ id, data }) {
      if (id) lastId = id;
      happened(JSON.parse(data));
    },
    alive: () => (heard = Date.now()),
    ended: failed,
  });
}

function disconnect(): void {
  clearTimeout(retry);
  stop?.();
  stop = null;
}

function failed(error: unknown): void {
  disconnect();
  if (error instanceof ApiError && error.status === 401) return signedOut();
  live.line = "offline";
  live.trouble = error instanceof ApiError && error.status ? reason(error) : "";
  retry = window.setTimeout(connect, patience);
  patience = Math.min(patience * 2, 5000);
}

function signedOut(): void {
  disconnect();
  wantSecret(true);
  live.line = "out";
}

whenUnauthorized(() => live.line !== "connecting" && signedOut());
whenSignedInElsewhere(connect);

export async function signOut(): Promise<void> {
  await ask("v1/signout", { method: "POST" }).catch(() => null);
  forget();
  live.wasIn = false;
  live.nodes = null;
  live.approvals = [];
  signedOut();
}

// What is out of date is fetched together, never twice at once, and less often when fetching is slow.

const fetchers: Record<string, () => Promise<void>> = {
  async nodes() {
    const answer = await ask<{ nodes: NodeInfo[]; primary: string | null }>("v1/nodes");
    live.nodes = answer.nodes;
    live.primary = answer.primary;
  },
  async approvals() {
    const answer = await ask<{ approvals: Approval[] }>("v1/approvals");
    // A new approval does not move the others.
    live.approvals = answer.approvals.sort((one, other) => one.asked_at - other.asked_at);
  },
  async health() {
    live.health = await ask<Health>("v1/health");
  },
};
const stale = new Set<string>();
let fetching = 0;
let pace = 120;

export function touch(...names: string[]): void {
  for (const name of names) stale.add(name);
  fetching ||= window.setTimeout(refresh, pace);
}

async function refresh(): Promise<void> {
  const names = [...stale];
  stale.clear();
  const began = performance.now();
  try {
    await Promise.all(names.map((name) => fetchers[name]()));
  } catch (error) {
    if (error instanceof ApiError && error.status === 0 && live.line === "live") failed(error);
  }
  pace = Math.max(120, 3 * (performance.now() - began));
  fetching = 0;
  if (stale.size) touch();
}

// A dead connection may not say so, and a page may have slept.
function wake(): void {
  if (live.line === "out" || document.hidden) return;
  if (live.line === "live" && Date.now() - heard > SILENCE) {
    live.line = "connecting";
    connect();
  } else if (live.line === "offline") {
    connect();
  }
}
window.addEventListener("focus", wake);
document.addEventListener("visibilitychange", wake);
window.addEventListener("online", wake);
setInterval(() => live.line === "live" && wake(), 20_000);
// Times and counts change without an event.
setInterval(() => live.line === "live" && !document.hidden && touch("nodes"), 15_000);
