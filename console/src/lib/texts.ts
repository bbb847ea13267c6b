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
  states: {
    running: "running", waiting: "waiting", ok: "ok", error: "error", timeout: "timeout", cancelled: "cancelled", denied: "denied", unknown: "unknown", online: "online", offline: "offline",
    frozen: "frozen", asked: "asked", pending: "pending", approved: "approved", rejected: "rejected", failed: "failed", sent: "sent", sending: "sending", queued: "queued", eligible: "eligible", lost: "lost", missed: "missed",
  } as Record<string, string>,
  time: { now: "just now", over: "past", ago: (span: string) => `${span} ago`, in: (span: string) => `in ${span}` },
  nav: {
    label: "Screens", more: "More", menu: "All screens", palette: "Find anything", skip: "Skip to the content",
    overview: "Overview", chat: "Chat", approvals: "Approvals", calls: "Calls", machines: "Machines", terminal: "Terminal", files: "Files",
    schedules: "Schedules", memory: "Memory and skills", people: "People and channels", access: "Access", budgets: "Budgets", journal: "Journal", add: "Add machine", settings: "Settings",
    missing: "There is no such screen", missingHint: "The address may be of another version of the console.",
    chunk: "This part of the console could not be loaded. If Farhand was updated, reload the page.", reload: "Reload",
  },
  line: {
    silent: "The gateway does not answer", streamEnded: "The stream of events ended", answered: (status: number) => `The gateway answered with status ${status}`,
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
    command: "Command", does: "Details", output: "Output of the trial", diff: "Changes", args: "Arguments", env: "Environment", stdin: "Standard input", rule: "Rule", until: "Until", by: "Asked by", session: "Session", folder: "Folder", note: "Note", machine: "Machine",
    from: (who: string, origins: string) => `${who}, from ${origins}`, notify: "Notify me in this browser", notifyOn: "Notifications are on", notifyOff: "Notifications are blocked in this browser", arrived: "Waiting for approval",
    unsure: "No answer. Check the list again before you decide.", history: "Decided", decided: (state: string, who: string) => `${state} by ${who}`, call: "Call", alwaysHint: "Adds a rule to the policy that allows this tool with exactly these arguments. You can see and remove it under Access.", left: "left",
  },
  machines: {
    title: "Machines", filter: "Filter machines", none: "No machine matches", add: "Add machine", lastSeen: "Last seen", tools: "Tools", charts: "Charts", jobs: "Jobs", logs: "Log", files: "Files", terminal: "Terminal", about: "What it lends",
    unknown: (id: string) => `There is no machine ${id}`, type: "Type", version: "Version", tags: "Tags", role: "Role", primary: "primary execution host", since: "Connected", limits: "Limits", noLimits: "none: the rights of the user who started it",
    capabilities: "Capabilities", refused: "Refused", workspace: "Workspace", environment: "Variables", running: "Running calls", revoke: "Revoke", forget: "Forget", describe: "Name and tags", describeTitle: (id: string) => `Name and tags of ${id}`, label: "Name", labelHint: (name: string) => `empty for the name that it reports: ${name}`, ownTags: "Use the tags that the machine reports", tagList: "Tags", tagsHint: "separated by commas; rules of the policy and calls to many machines use them", reports: (tags: string) => `It reports: ${tags || "none"}`,
    calls: "Reported name", revokeTitle: (id: string) => `Revoke ${id}`, revokeWhat: "Its credential stops working at once, and the machine is disconnected. To use it again, pair it again.", revokeNone: "No credential of its own was found: it uses a shared token, or is lent by this gateway.", revoked: "Revoked.",
    hour: "Hour", sixHours: "6 hours", day: "Day", cpu: "CPU, %", memory: "Memory, GiB", disk: "Disk, GiB", load: "Load", noSamples: "No measurements yet", noSamplesHint: "Machines with Farhand's node program report every ten seconds.",
    pick: "Choose a tool", search: "Find a tool", byName: (name: string) => `Call ${name} by name`, noTools: "No matching tools", call: "Call", form: "Form", json: "JSON", invalid: (why: string) => `Invalid JSON: ${why}`, result: "Result", openCall: "Open the call",
    uncertain: "No answer. The call may have run; see Calls when the gateway is back.", keys: "Ctrl + Enter calls",
    noJobs: "No commands", noJobsHint: "Commands that this machine ran in the last half hour appear here.", kill: "Kill", input: "Input", sendInput: "Send", command: "Command", pid: "Process", started: "Started", exit: "Exit", ended: "ended", signal: (name: string) => `signal ${name}`, lost: "lost",
    noLog: "The log is empty", lines: (count: number) => `${count} lines`, list: "Empty; add one value per line", gatewayTools: "Tools of the gateway",
  },
  terminal: {
    title: "Terminal", list: "Terminals", open: "Open a terminal", node: "Machine", command: "Command", commandHint: "a shell line; empty for the login shell", folder: "Folder", none: "No terminals", noneHint: "A terminal keeps running on its machine when you close this page, and when the gateway restarts.",
    viewers: (count: number) => plural(count, "viewer"), end: "End", attach: "Open", connecting: "Connecting", reconnecting: "Connection lost; reconnecting", ended: (how: string) => `The command has ended (${how})`, nodeGone: "The machine is offline; the terminal continues when it is back", ready: "Connected",
    search: "Search in the terminal", next: "Next", previous: "Previous", copy: "Copy selection", keys: "Keys", failed: (why: string) => `The terminal cannot be opened: ${why}`, started: "Started", running: "running", waiting: "Opening; an approval may be needed", unsupported: "This gateway has no terminals.",
  },
  chat: {
    title: "Chat", sessions: "Sessions", none: "No sessions yet", start: "Say something to the agent", startHint: "It can use every machine and tool that you allow.", placeholder: "Message to the agent", message: "Message", send: "Send", stop: "Stop", retry: "Send again", fork: "Fork from here", newSession: "New session", newKey: "Name of the session",
    model: "Model", modelHint: "empty for the session's own", thinking: "Thinking", upload: "Upload a file", uploaded: (path: string) => `Uploaded to ${path} in the workspace.`, tokens: (count: number) => `${count.toLocaleString("en-US")} tokens`, running: "running", idle: "idle", you: "You", agent: "Agent", thought: "Thoughts", summary: "Summary of earlier messages",
    older: "Load older messages", args: "Arguments", result: "Result", live: "Live output", failed: "The run failed", retrying: (why: string) => `Trying again: ${why}`, forked: "Forked", openCall: "Open the call", image: "Image", attach: "Image", attached: "Images of this message", detach: "Remove the image", tooMany: (most: number) => `A message has at most ${most} images.`, noImage: (name: string) => `${name} is not a PNG, JPEG, GIF or WebP image that can be read.`, queued: (count: number) => `${plural(count, "message")} waiting`,
  },
  files: {
    title: "Files", workspace: "Workspace", places: "Places", path: "Path", pathHint: "Path of a folder or file", go: "Go", up: "Up", empty: "This folder is empty", pick: "Choose a file", pickHint: "Text is shown here; anything can be downloaded, or dragged onto another place to copy it there.", upload: "Upload", download: "Download", edit: "Edit", save: "Save", saved: "Saved.", remove: "Delete",
    conflict: "The file changed since you opened it. Nothing was saved. Reload it to see the new content; your text stays in the editor until then.", reload: "Reload", newFile: "New file", copyTo: "Copy to", copied: "Copied.", transfers: "Transfers", binary: "This is not text; download it to look at it.", large: (size: string) => `Too long to show (${size}); download it.`,
    drop: "Drop files to upload them here", name: "Name", confirmRemove: (name: string) => `Delete ${name}?`, source: "From", destination: "To", progress: "Progress",
  },
  schedules: {
    title: "Schedules", pick: "Choose a schedule", none: "No schedules", noneHint: "A schedule sends a message to the agent, or makes a call, at the times you choose.", add: "New schedule", edit: "Change schedule", name: "Name", when: "When", whenHint: "such as “every weekday at 9”, “every 15 minutes”, “tomorrow 9am” or “0 3 * * *”", message: "Message to the agent", mode: "How", modeTask: "In a session of its own", modeEvent: "In the main session", slots: "Next slots", enabled: "Enabled", paused: "paused",
    run: "Run now", history: "History", noHistory: "No slot yet", next: "Next", remove: "Remove", disable: "Disable", enable: "Enable", made: "Created by", missed: "When missed", late: "late", took: "Took", started: "It runs now.", preview: "Preview", retries: "Retries", nothing: "No further slot", slot: "Slot", confirmRemove: (name: string) => `Remove ${name}?`,
  },
  memory: {
    title: "Memory and skills", memory: "Memory", skills: "Skills", search: "Search in memory", none: "Nothing found", files: "Files", noFiles: "No memory yet", noFilesHint: "The agent keeps what it learns in MEMORY.md and memory/*.md.", index: (chunks: number, files: number, kind: string) => `${plural(files, "file")}, ${plural(chunks, "piece")}, ${kind} index`, reindex: "Index again", versions: "Changes", noVersions: "No recorded changes",
    pickSkill: "Choose a skill", noSkills: "No skills", noSkillsHint: "A skill is a folder with a SKILL.md that tells the agent how to do something.", eligible: "eligible", blocked: "not eligible", hosts: "Machines", reasons: "Why not", newSkill: "New skill", skillName: "Name of the skill", source: "Source", lines: (from: number, to: number) => `lines ${from} to ${to}`, newFile: "New memory file",
  },
  people: {
    title: "People and channels", channels: "Channels", pairings: "People who asked for access", outbox: "Outbox", noPairings: "No requests", noPairingsHint: "People who write to the agent on a channel for the first time appear here. Approve those you know.", noMessages: "No messages", noMessagesHint: "Messages that the agent sends to people on channels appear here, with their delivery.", policy: "Who may write", waiting: "waiting", trouble: "Trouble", fine: "working", approve: "Approve", reject: "Reject", forget: "Withdraw", retry: "Send again", to: "To", text: "Text", attempts: (count: number) => plural(count, "attempt"), hooks: "Hooks", noHooks: "No hooks", noHooksHint: "A hook is an address at which another program can start a run of the agent. Create one with farhand channels hook add.", signed: "signed", unsigned: "not signed", firstText: "First message", code: "Code",
  },
  access: {
    title: "Access", tokens: "Tokens", policy: "Policy", always: "Always allowed", connect: "Connect a client", clients: "Clients and secrets", sessions: "Browsers", secrets: "Secrets", noTokens: "No tokens", add: "New token", label: "Label", scopes: "Scopes", tools: "Only these tools", nodes: "Only these machines", oneEach: "one pattern per line; empty for all", expires: "Expires", never: "never", valid: "valid", lastUsed: "Last used", revoke: "Revoke", revoked: "revoked", expired: "expired", made: "Created by", created: "Created",
    once: "Copy this token now. It is not shown again.", hour: "in an hour", day: "in a day", week: "in a week", month: "in 30 days", confirmRevoke: (label: string) => `Revoke ${label}?`, also: (count: number) => `${plural(count, "token")} that it created were revoked as well.`,
    rules: "Rules in force", rulesHint: "The first matching rule decides. They are in farhand.toml; a change applies to the next call.", newRule: "new rule", addRule: "Add a rule", discard: "Discard the changes", saved: "Saved. These rules are in force now.", saveHint: "Replay the changed rules; then they can be saved.", conflict: "The policy has changed since you loaded it. Nothing was saved. “Discard the changes” loads the rules in force.", explainDraft: "Which of the changed rules would decide a call?", default: "Otherwise", noRules: "No rules: everything is allowed.", explain: "Why", explainHint: "Which rule would decide a call?", tool: "Tool", args: "Arguments (JSON)", ask: "Explain", replay: "Change the rules", replayHint: "Edit the rules and see which calls of the last week they would have stopped or asked about. Nothing changes until you save.", since: "Calls since", run: "Replay the last week", draft: "Rules (JSON)", replayed: (calls: number, deny: number, asked: number) => `Of ${calls.toLocaleString("en-US")} calls: ${deny} denied, ${asked} asked about.`, none: "It would have stopped nothing.", toml: "As farhand.toml",
    noAlways: "Nothing is always allowed", alwaysHint: "Calls that you approved with “always allow exactly this”.", remove: "Remove", noClients: "No OAuth clients", clientsHint: "Programs that signed in with OAuth, such as MCP clients on the web, appear here.", noSecrets: "No secrets", secretsHint: "Values that calls use as {{secret:NAME}} without seeing them. Add one with farhand secret set. Only names are shown here.", current: "this browser", end: "Sign out", endAll: "Sign out everywhere", fits: "Matching rules, in order",
  },
  connect: {
    title: "Connect an MCP client", how: "The client gets a token of its own and sees the tools of every machine. Restrict or revoke the token under Tokens.", client: "Client", local: "This address works on the gateway's own machine only.", make: (name: string) => `Make a token for ${name}`,
    file: "Add this to", project: "or, for one project, to", snippet: "Configuration", command: "Or let the command line do it", oauth: "Clients with OAuth need only the address",
  },
  budgets: {
    title: "Budgets", what: "A budget limits money, tokens, calls, bytes, machines or time. When it is used up, calls and model requests are denied until it renews or you raise it.", add: "Set a budget", none: "No budgets",
    noneHint: "Nothing is limited. Set a budget for everything together, or for one token, agent or session.", for: "Budget for", choose: "Choose one", limits: "Limits", limitsHint: "empty for no limit", unlimited: "no limit", spent: "Used up",
    groups: { all: "Gateway", token: "Token", agent: "Agent", session: "Session" }, scopes: { all: "Everything together", token: "Token", agent: "Agent", session: "Session" } as Record<string, string>,
    each: { all: "Everything together", token: "Each token", agent: "Each agent", session: "Each session" } as Record<string, string>,
    units: { money: "Money", tokens: "Model tokens", calls: "Calls", bytes: "Data", machines: "Machines", wall_seconds: "Running time" }, unitHints: { money: "US dollars", tokens: "in and out", calls: "of tools", bytes: "bytes", machines: "different ones", wall_seconds: "seconds" },
    periods: { day: "Per day", total: "In total" }, periodOf: (unit: string) => `Period: ${unit}`, of: (used: string, limit: string) => `${used} of ${limit}`, renews: "renews", reserved: (amount: string) => `${amount} reserved`, fromSettings: "from farhand.toml",
    defaults: "Limits in farhand.toml", defaultsHint: "They apply to each token, agent or session for which nothing else is set. Change them in the section [budgets].", editTitle: (name: string) => `Budget: ${name}`, editOf: (name: string) => `Edit the budget of ${name}`, removeOf: (name: string) => `Remove the budget of ${name}`,
    editHint: "Where you set no limit, the one in farhand.toml applies. Days are days in UTC.", needsLimit: "Enter at least one limit.", confirmRemove: (name: string) => `Remove the limits that were set for ${name}?`, tokenLimits: "Budget of the token",
  },
  receipt: {
    title: "Receipt", what: "A signed file that shows which call ran where, for whom, when and with which outcome. Anyone can verify it without this gateway.", gateway: "Gateway", machine: "Machine", signed: (at: string) => `signed ${at}`,
    registered: "signed with the key that is registered for this machine", announced: "signed with a key that the machine announced", unsigned: "not signed", args: "Arguments, SHA-256", result: "Result, SHA-256", content: "Include the arguments and the result", download: "Download the receipt",
    verify: "To verify the file, on any computer with Farhand:",
  },
  journal: {
    title: "Journal", kind: "Kind", kindHint: "call, node.online", machine: "Machine", session: "Session", since: "Since", until: "Until", none: "No events match", audit: "Audit", head: "Newest event", verify: "Note this value elsewhere; verify the journal with farhand audit verify --head.", export: "Export", exportHint: "As JSON lines, what is shown and older", exporting: "Exporting", subject: "Subject", travel: "Up to this moment", now: "Now", data: "Data", live: "New events appear at the top.", call: "Open the call", run: "Run",
  },
  add: {
    title: "Add machine", how: "Run one line on the other machine. It installs Farhand, if needed, and connects the machine to this gateway.", id: "Name of the machine", idHint: "optional; by default its host name", limits: "What it lends", root: "Only this folder", readOnly: "Read only", tags: "Tags", tagsHint: "separated by commas", deny: "Without these tools", denyHint: "separated by commas, such as Bash", expires: "The code is valid for", minutes: "10 minutes", hour: "an hour", day: "a day", make: "Make a code", systems: { unix: "Linux and macOS", farhand: "Farhand is already installed" },
    qr: "QR code of the line", until: "Valid", waiting: "Waiting for the machine", joined: (id: string) => `${id} has joined`, open: "Open it", again: "Another code", address: "Address", local: "This gateway listens on this machine only. For other machines, start it with a public address; see the documentation.",
  },
  settings: {
    title: "Settings", appearance: "Appearance", theme: "Theme", themes: { system: "Same as the system", light: "Light", dark: "Dark", contrast: "High contrast" }, density: "Density", densities: { comfortable: "Comfortable", compact: "Compact" }, notifications: "Notifications", models: "Model", test: "Test", testing: "Testing", works: (seconds: string) => `It answered in ${seconds}.`, current: "The agent's model", prompt: "Every request carries", tools: (count: number) => plural(count, "tool"), mcp: "MCP servers", noMcp: "No MCP servers", mcpHint: "Other people's MCP servers behind the gate. Add one here or with farhand mcp add.", name: "Name", url: "Address", add: "Add", restart: "Restart", gateway: "Gateway", version: "Version", id: "Id", backup: "Last backup", config: "Configuration in force", configHint: "From farhand.toml and the environment; secrets are hidden.", failed: (why: string) => `It failed: ${why}`, accept: "Accept the changed tools",
  },
};
