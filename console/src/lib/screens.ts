// The screens. Each is loaded when it is opened for the first time.

import type { Component } from "svelte";
import { t } from "./texts";

export interface Screen {
  id: string;
  title: string;
  icon: string;
  load: () => Promise<{ default: Component }>;
}

export const SCREENS: Screen[] = [
  { id: "overview", title: t.nav.overview, icon: "overview", load: () => import("../screens/Overview.svelte") },
  { id: "approvals", title: t.nav.approvals, icon: "approvals", load: () => import("../screens/Approvals.svelte") },
  { id: "calls", title: t.nav.calls, icon: "calls", load: () => import("../screens/Calls.svelte") },
  { id: "machines", title: t.nav.machines, icon: "machines", load: () => import("../screens/Machines.svelte") },
  { id: "terminal", title: t.nav.terminal, icon: "terminal", load: () => import("../screens/Terminal.svelte") },
];
