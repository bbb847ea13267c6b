import { onDestroy } from "svelte";

/** Returns a function that tells whether the component still exists, for what comes after an answer. */
export function living(): () => boolean {
  let alive = true;
  onDestroy(() => (alive = false));
  return () => alive;
}
