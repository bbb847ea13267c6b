// Every text of the console, in one place so that it can be translated.

const plural = (count: number, one: string, many = `${one}s`): string => `${count.toLocaleString("en-US")} ${count === 1 ? one : many}`;

export const t = {
  name: "Farhand",
  common: {
    again: "Try again", loading: "Loading", nothing: "Nothing here yet", close: "Close", cancel: "Cancel", save: "Save", copy: "Copy", copied: "Copied",
    remove: "Remove", create: "Create", search: "Search", all: "All", none: "None", back: "Back", done: "Done", open: "Open", refresh: "Refresh", edit: "Edit",
    more: (count: number) => `… ${count.toLocaleString("en-US")} more characters`,
    older: "Load older", name: "Name", state: "State", yes: "Yes", no: "No", optional: "optional", required: "required", machine: "Machine", gateway: "Gateway",
    confirm: "Confirm", unknown: "unknown", failed: (what: string) => `Failed: ${what}`,
  },
  time: { now: "just now", over: "over", ago: (span: string) => `${span} ago`, in: (span: string) => `in ${span}` },
  nav: {
    label: "Screens", more: "More", menu: "All screens", palette: "Find anything", skip: "Skip to the content",
    overview: "Overview", chat: "Chat", approvals: "Approvals", calls: "Calls", machines: "Machines", terminal: "Terminal", files: "Files",
    schedules: "Schedules", memory: "Memory and skills", people: "People and channels", access: "Access", journal: "Journal", add: "Add machine", settings: "Settings",
    missing: "There is no such screen", missingHint: "The address may be of another version of the console.",
    chunk: "This part of the console could not be loaded. If Farhand was updated, reload the page.", reload: "Reload",
  },
  line: {
    live: "Live", connecting: "Connecting", offline: "Offline", out: "Not signed in",
    gone: "The gateway does not answer. This page may be out of date; it reconnects automatically.",
    refused: (why: string) => `The gateway refused the request: ${why}. This page may be out of date; it reconnects automatically.`,
  },
  session: {
    title: "Not signed in", spent: "This sign-in link was already used or has expired.",
    how: "Run this on the gateway's machine to get a sign-in link. Each link works once.", command: "farhand console", again: "Try again",
    ended: "Your session has ended",
    keep: "Nothing you typed is lost. Open a new sign-in link in this browser, in another tab; this page then continues where it was.",
    out: "Sign out",
  },
  palette: { title: "Command palette", placeholder: "Find a screen, machine, tool, call or action", none: "Nothing matches", screen: "Screen", machine: "Machine", tool: "Tool", action: "Action", call: "Call", session: "Chat", freeze: "Freeze everything", thaw: "Lift the freeze", signout: "Sign out", theme: (name: string) => `Theme: ${name}`, openCall: (id: string) => `Open call ${id}` },
  overview: {
    machines: "Machines", online: (count: number, all: number) => `${count} of ${all} online`, running: "Running now", idle: "Nothing is running",
    waiting: "Waiting for approval", noWaiting: "Nothing waits for you", failures: "Failures of the last day", noFailures: "No call failed",
    next: "Next schedules", noNext: "Nothing is scheduled", cost: "Today", tokens: (count: number) => `${count.toLocaleString("en-US")} tokens`, runs: (count: number) => plural(count, "run"),
    cpu: "CPU", memory: "Memory", disk: "Disk", load: "Load", noMetrics: "No measurements yet", openCalls: "Open calls", allCalls: "All calls", showAll: "Show all",
    first: "No machines yet", firstHint: "Add the first one: it takes one command on that machine.", found: (count: number) => plural(count, "machine"), filter: "Filter machines",
  },
  freeze: {
    freeze: "Freeze", thaw: "Lift the freeze", title: "Freeze everything", frozen: "Frozen",
    what: "Ends every process on every machine and in the gateway, and refuses all calls until the freeze is lifted.",
    reason: "Reason", by: (who: string) => `Frozen by ${who}`, confirmed: "confirmed", unconfirmed: "not confirmed", offline: "offline: it freezes when it returns",
    ended: (processes: number, calls: number) => `${plural(processes, "process", "processes")} ended, ${plural(calls, "call")} stopped`,
    gateway: "The gateway itself", thawWhat: "Machines take calls again.", perMachine: "Confirmation per machine",
  },
  calls: {
    title: "Calls", filters: "Filters", tool: "Tool", machine: "Machine", state: "State", session: "Session", credential: "Credential", text: "Text", since: "Since", any: "Any",
    sinceHour: "Last hour", sinceDay: "Last day", sinceWeek: "Last week", none: "No calls", noneHint: "Calls of agents, schedules and people appear here as they happen.", noMatch: "No call matches the filters",
    clear: "Clear filters", count: (count: number, more: boolean) => `${count.toLocaleString("en-US")}${more ? "+" : ""} calls`, loadingOlder: "Loading older calls",
    detail: "Call", arguments: "Arguments", output: "Output", result: "Result", error: "Error", why: "Why it was allowed", whyDenied: "What decided", cancel: "Cancel call", again: "Run again", againEdit: "Change and run",
    undo: "Undo", undoPreview: "Undo: preview", undoNothing: "This call changed no file that can be restored.", undoDo: "Restore these files", undone: "The files were restored.", undoAs: (id: string) => `Recorded as call ${id}`,
    journal: "In the journal", by: "By", onBehalf: "on behalf of", started: "Started", took: "Took", route: "Route", deadline: "Deadline", agent: "Agent", running: "running",
    decision: "Decision", rule: "Rule", reason: "Reason", origins: "From", approval: "Approved by", outputSkipped: (count: string) => `The first ${count} are no longer shown.`, outputEnd: "The command has ended.",
    outputNone: "No output yet", outputMissing: "No output was kept.", following: "following", waitsApproval: "waits for approval", waitsNode: "waits for its machine", openApproval: "Open the approval", exit: (code: number) => `exit code ${code}`, keys: "Use the arrow keys and Enter to open a call.",
  },
  approvals: {
    title: "Approvals", none: "Nothing waits for you", noneHint: "Calls that a policy rule asks about appear here.", approve: "Approve", deny: "Deny", always: "Always allow exactly this", reason: "Reason for denying",
    command: "Command", diff: "Changes", args: "Arguments", env: "Environment", stdin: "Standard input", rule: "Rule", until: "Until", by: "Asked by", session: "Session", folder: "Folder", note: "Note", machine: "Machine",
    from: (who: string, origins: string) => `${who}, from ${origins}`, notify: "Notify me in this browser", notifyOn: "Notifications are on", notifyOff: "Notifications are blocked in this browser", arrived: "Waiting for approval",
    unsure: "No answer. Check the list again before you decide.", history: "Decided", decided: (state: string, who: string) => `${state} by ${who}`, call: "Call", alwaysHint: "Adds a rule to the policy that allows this tool with exactly these arguments. You can see and remove it under Access.", left: "left",
  },
  machines: {
    title: "Machines", filter: "Filter machines", none: "No machine matches", add: "Add machine", lastSeen: "Last seen", tools: "Tools", charts: "Charts", jobs: "Jobs", logs: "Log", files: "Files", terminal: "Terminal", about: "What it lends",
    unknown: (id: string) => `There is no machine ${id}`, type: "Type", version: "Version", tags: "Tags", role: "Role", primary: "primary execution host", since: "Connected", limits: "Limits", noLimits: "none: the rights of the user who started it",
    capabilities: "Capabilities", refused: "Refused", workspace: "Workspace", environment: "Variables", running: "Running calls", revoke: "Revoke", forget: "Forget",
    revokeTitle: (id: string) => `Revoke ${id}`, revokeWhat: "Its credential stops working at once, and the machine is disconnected. To use it again, pair it again.", revokeNone: "No credential of its own was found: it uses a shared token, or is lent by this gateway.", revoked: "Revoked.",
    hour: "Hour", sixHours: "6 hours", day: "Day", cpu: "CPU, %", memory: "Memory, GiB", disk: "Disk, GiB", load: "Load", noSamples: "No measurements yet", noSamplesHint: "Machines with Farhand's node program report every ten seconds.",
    pick: "Choose a tool", search: "Find a tool", byName: (name: string) => `Call ${name} by name`, noTools: "No matching tools", call: "Call", form: "Form", json: "JSON", invalid: (why: string) => `Invalid JSON: ${why}`, result: "Result", openCall: "Open the call",
    uncertain: "No answer. The call may have run; see Calls when the gateway is back.", keys: "Ctrl + Enter calls",
    noJobs: "No commands", noJobsHint: "Commands that this machine ran in the last half hour appear here.", kill: "Kill", input: "Input", sendInput: "Send", command: "Command", pid: "Process", started: "Started", exit: "Exit", ended: "ended", signal: (name: string) => `signal ${name}`, lost: "lost",
    noLog: "The log is empty", lines: (count: number) => `${count} lines`, list: "Empty; add one value per line", gatewayTools: "Tools of the gateway",
  },
  terminal: {
    title: "Terminal", open: "Open a terminal", node: "Machine", command: "Command", commandHint: "a shell line; empty for the login shell", folder: "Folder", none: "No terminals", noneHint: "A terminal keeps running on its machine when you close this page, and when the gateway restarts.",
    viewers: (count: number) => plural(count, "viewer"), end: "End", attach: "Open", connecting: "Connecting", reconnecting: "Connection lost; reconnecting", ended: (how: string) => `The command has ended (${how})`, nodeGone: "The machine is offline; the terminal continues when it is back", ready: "Connected",
    search: "Search in the terminal", next: "Next", previous: "Previous", copy: "Copy selection", keys: "Keys", failed: (why: string) => `The terminal cannot be opened: ${why}`, started: "Started", running: "running", waiting: "Opening; an approval may be needed", unsupported: "This gateway has no terminals.",
  },
};
