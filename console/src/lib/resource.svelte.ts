// Something fetched from the gateway and kept up to date by events.

import { ask, reason } from "./api";
import { live, onEvent } from "./live.svelte";

export interface Resource<T> {
  readonly data: T | undefined;
  readonly error: string;
  readonly loading: boolean;
  reload(): void;
}

interface Options {
  /** Beginnings of the kinds of events after which it is fetched again. */
  on?: string[];
  /** Also fetch again this often, in milliseconds. */
  every?: number;
}

/** Call it while a component initialises. `path` returns null to fetch nothing. */
export function resource<T = any>(path: () => string | null, { on = [], every = 0 }: Options = {}): Resource<T> {
  let data = $state.raw<T | undefined>(undefined);
  let error = $state("");
  let loading = $state(true);
  let again = $state(0);
  let shown: string | null = null;

  $effect(() => {
    const wanted = path();
    void again;
    void live.connections;
    if (wanted !== shown) {
      data = undefined;
      shown = wanted;
    }
    if (wanted === null) {
      loading = false;
      return;
    }
    loading = true;
    const line = new AbortController();
    ask<T>(wanted, { signal: line.signal })
      .then((answer) => {
        data = answer;
        error = "";
        loading = false;
      })
      .catch((problem) => {
        if (line.signal.aborted) return;
        error = reason(problem);
        loading = false;
      });
    return () => line.abort();
  });

  $effect(() => {
    let waiting = 0;
    const later = () => {
      waiting ||= window.setTimeout(() => {
        waiting = 0;
        again += 1;
      }, 250);
    };
    const stop = onEvent((event) => on.some((kind) => event.kind.startsWith(kind)) && later());
    const timer = every ? window.setInterval(() => !document.hidden && live.line === "live" && (again += 1), every) : 0;
    return () => {
      stop();
      clearTimeout(waiting);
      clearInterval(timer);
    };
  });

  return {
    get data() {
      return data;
    },
    get error() {
      return error;
    },
    get loading() {
      return loading && data === undefined;
    },
    reload() {
      again += 1;
    },
  };
}
