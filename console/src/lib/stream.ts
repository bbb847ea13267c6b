// The stream of events, one for all tabs of a session: browsers open only six connections to a server, and a stream
// keeps one. The tab that holds a lock reads it and tells the others; when that tab is closed or no longer answers,
// another one takes over. Without locks (pages that are neither encrypted nor local) each tab has its own.

import { ApiError, readEvents, send } from "./api";
import { t } from "./texts";

export interface StreamEvent {
  id?: string;
  data: string;
}

interface Heard {
  opened(): void;
  event(event: StreamEvent): void;
  alive(): void;
  ended(error: unknown): void;
}

type Said = { ask: true } | { opened: true } | { event: StreamEvent } | { alive: true } | { ended: true };

// How long the tab that reads may take to answer before another one takes over.
const ANSWER_MS = 4000;

/** A name for the tabs of one session: those of another session may see other events. */
export function nameOf(place: string, secret: string | null): string {
  let hash = 2166136261;
  for (const one of secret ?? "") hash = Math.imul(hash ^ one.charCodeAt(0), 16777619);
  return `farhand events ${place} ${(hash >>> 0).toString(16)}`;
}

async function read(lastId: string, signal: AbortSignal, heard: Heard): Promise<never> {
  const response = await send("v1/events", { signal, headers: lastId ? { "last-event-id": lastId } : {} });
  heard.opened();
  await readEvents(response, ({ id, data }) => data && heard.event({ id, data }), heard.alive);
  throw new ApiError(t.line.streamEnded, 0);
}

/** Follows the events after `lastId`; returns how to stop. Nothing is heard after the end. */
export function follow(name: string, lastId: () => string, heard: Heard): () => void {
  const closing = new AbortController();
  const end = (error: unknown) => {
    if (closing.signal.aborted) return;
    closing.abort();
    heard.ended(error);
  };
  if (!navigator.locks) {
    read(lastId(), closing.signal, heard).catch(end);
    return () => closing.abort();
  }

  const tabs = new BroadcastChannel(name);
  const tell = (said: Said) => tabs.postMessage(said);
  let isReader = false;
  let isOpen = false;
  const open = () => {
    clearTimeout(waiting);
    isOpen = true;
    heard.opened();
  };
  tabs.onmessage = ({ data }: MessageEvent<Said>) => {
    if ("ask" in data) {
      if (isReader && isOpen) tell({ opened: true });
    } else if (isReader) return;
    else if ("opened" in data) {
      if (!isOpen) open();
    } else if ("event" in data) {
      if (isOpen) heard.event(data.event);
    } else if ("alive" in data) heard.alive();
    else if ("ended" in data) end(new ApiError(t.line.streamEnded, 0));
  };

  let attempts = 0;
  function lead(steal: boolean): void {
    const attempt = ++attempts;
    const reading = new AbortController();
    const stop = () => reading.abort();
    closing.signal.addEventListener("abort", stop);
    const run = async () => {
      if (attempt !== attempts) return;
      clearTimeout(waiting);
      isReader = true;
      const all: Heard = {
        opened() {
          tell({ opened: true });
          if (!isOpen) open();
        },
        event(event) {
          tell({ event });
          heard.event(event);
        },
        alive() {
          tell({ alive: true });
          heard.alive();
        },
        ended() {},
      };
      await read(lastId(), reading.signal, all).catch((error) => {
        // Another tab that took the lock reads now; this one hears it.
        if (reading.signal.aborted) return;
        tell({ ended: true });
        end(error);
      });
    };
    navigator.locks.request(name, steal ? { steal } : { signal: closing.signal }, run).catch(() => {
      reading.abort();
      if (attempt !== attempts) return;
      isReader = false;
      if (!closing.signal.aborted) lead(false);
    });
  }
  // A tab that sleeps keeps its lock.
  let waiting = window.setTimeout(() => lead(true), ANSWER_MS);
  closing.signal.addEventListener("abort", () => {
    clearTimeout(waiting);
    tabs.close();
  });
  tell({ ask: true });
  lead(false);
  return () => closing.abort();
}
