// Browser notifications for calls that wait for approval.

import { subject } from "./format";
import { live } from "./live.svelte";
import { link } from "./router.svelte";
import { t } from "./texts";

const supported = "Notification" in window;
export const notifications = $state({ permission: supported ? Notification.permission : ("denied" as NotificationPermission) });

export async function askForNotifications(): Promise<void> {
  if (supported) notifications.permission = await Notification.requestPermission();
}

/** Shows a notification for every approval that arrives while the page is open. */
export function watchApprovals(): void {
  let known: Set<string> | null = null;
  $effect(() => {
    const ids = new Set(live.approvals.map(({ id }) => id));
    const fresh = known && live.approvals.filter(({ id }) => !known!.has(id));
    if (live.line === "live") known = ids;
    if (!fresh?.length || notifications.permission !== "granted" || !document.hidden) return;
    for (const one of fresh.slice(0, 3)) {
      const shown = new Notification(`${t.approvals.arrived}: ${one.tool}`, { body: one.command ?? subject(one.args), tag: one.id });
      shown.onclick = () => {
        window.focus();
        location.hash = link("approvals", one.id);
      };
    }
  });
}
