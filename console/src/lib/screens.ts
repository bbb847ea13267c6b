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
  { id: "chat", title: t.nav.chat, icon: "chat", load: () => import("../screens/Chat.svelte") },
  { id: "approvals", title: t.nav.approvals, icon: "approvals", load: () => import("../screens/Approvals.svelte") },
  { id: "calls", title: t.nav.calls, icon: "calls", load: () => import("../screens/Calls.svelte") },
  { id: "machines", title: t.nav.machines, icon: "machines", load: () => import("../screens/Machines.svelte") },
  { id: "terminal", title: t.nav.terminal, icon: "terminal", load: () => import("../screens/Terminal.svelte") },
  { id: "files", title: t.nav.files, icon: "files", load: () => import("../screens/Files.svelte") },
  { id: "schedules", title: t.nav.schedules, icon: "schedules", load: () => import("../screens/Schedules.svelte") },
  { id: "memory", title: t.nav.memory, icon: "memory", load: () => import("../screens/Memory.svelte") },
  { id: "people", title: t.nav.people, icon: "people", load: () => import("../screens/People.svelte") },
  { id: "access", title: t.nav.access, icon: "access", load: () => import("../screens/Access.svelte") },
  { id: "budgets", title: t.nav.budgets, icon: "budgets", load: () => import("../screens/Budgets.svelte") },
  { id: "journal", title: t.nav.journal, icon: "journal", load: () => import("../screens/Journal.svelte") },
  { id: "add", title: t.nav.add, icon: "add", load: () => import("../screens/AddMachine.svelte") },
  { id: "settings", title: t.nav.settings, icon: "settings", load: () => import("../screens/Settings.svelte") },
];
