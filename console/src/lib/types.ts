// What the HTTP interface answers, as far as the console uses it.

export type State = "running" | "waiting" | "ok" | "error" | "timeout" | "cancelled" | "denied" | "unknown";

export interface Health {
  status: string;
  version: string;
  gateway_id: string;
  nodes: { known: number; online: number };
  calls: { open: number };
  frozen: { since: number; by: string; reason: string } | null;
  store: { backup_at: number | null; backup_failure: string | null; recovery: { reason: string } | null };
}

export interface Sample {
  at: number;
  cpu: number;
  memory: number;
  memory_total: number;
  disk: number;
  disk_total: number;
  load: number;
}

export interface NodeInfo {
  node_id: string;
  name: string;
  /** What the owner calls it; empty if nothing. */
  label: string;
  node_type: string;
  version: string;
  tags: string[];
  reported_tags: string[];
  capabilities: string[];
  refused_capabilities: string[];
  tools: string[];
  role: string;
  online: boolean;
  frozen: boolean;
  connected_at: number | null;
  last_seen: number | null;
  running: number;
  runtime: Record<string, unknown>;
}

export interface Call {
  request_id: string;
  id: string;
  tool: string;
  state: State;
  route: { kind: string; node_id?: string; capability?: string };
  credential: string;
  on_behalf_of: string | null;
  session_key: string | null;
  agent_id: string | null;
  background: boolean;
  created_at: number;
  deadline_at: number;
  ended_at: number | null;
  duration_ms: number | null;
  args?: Record<string, unknown> | null;
  result?: unknown;
  error?: { kind: string; message: string };
  waits_for?: string;
  approval_id?: string | null;
}

export interface Approval {
  id: string;
  call_id: string;
  state: string;
  hash: string;
  rule: string;
  reason: string;
  asked_at: number;
  deadline_at: number;
  decided_by: string | null;
  decided_at: number | null;
  remark: string | null;
  tool: string;
  node_id: string | null;
  args: Record<string, unknown> | null;
  credential: string;
  on_behalf_of: string | null;
  origins: string[];
  session_key: string | null;
  command: string | null;
  cwd: string | null;
  env: Record<string, string>;
  stdin: string | null;
  summary: string;
  output: string;
  diff: string;
  note: string;
}

export interface JournalEvent {
  id: number;
  at: number;
  kind: string;
  subject: string;
  data: Record<string, unknown>;
}

export interface Tool {
  name: string;
  description: string;
  parameters: Schema;
  host: string;
}

export interface Schema {
  type?: string | string[];
  properties?: Record<string, Schema>;
  required?: string[];
  description?: string;
  enum?: unknown[];
  const?: unknown;
  default?: unknown;
  items?: Schema;
  anyOf?: Schema[];
  oneOf?: Schema[];
  minimum?: number;
  maximum?: number;
  examples?: unknown[];
  [other: string]: unknown;
}

export interface Job {
  job_id: string;
  node_id: string;
  command: string;
  started_at: number;
  running: boolean;
  call_id: string | null;
  workdir: string;
  pid: number;
  background: boolean;
  ended_at: number | null;
  exit_code: number | null;
  signal: string | number | null;
  lost: boolean;
  output_bytes: number;
}
