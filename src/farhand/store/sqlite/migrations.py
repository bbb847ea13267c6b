"""The tables, step by step. A step that was released is never edited; a change is a new step at the end."""

from __future__ import annotations

from typing import Final

# Stores from before this step are refused: their journal has no seals.
SEALED: Final = """
ALTER TABLE events ADD COLUMN hash BLOB;
"""

MIGRATIONS: Final[tuple[str, ...]] = (
    """
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE calls (
    seq             INTEGER PRIMARY KEY,
    id              TEXT NOT NULL UNIQUE,
    tool            TEXT NOT NULL,
    args            BLOB NOT NULL,
    session_key     TEXT,
    agent_id        TEXT,
    credential      TEXT NOT NULL,
    route           TEXT NOT NULL,
    node_id         TEXT,
    capability      TEXT,
    node_boot       TEXT,
    background      INTEGER NOT NULL,
    idempotency_key TEXT,
    state           TEXT NOT NULL,
    created_at      INTEGER NOT NULL,
    deadline_at     INTEGER NOT NULL,
    ended_at        INTEGER,
    duration_ms     REAL,
    result          BLOB,
    error_kind      TEXT,
    error_message   TEXT
) STRICT;
CREATE INDEX calls_open ON calls (node_id) WHERE ended_at IS NULL;

CREATE TABLE idempotency (
    credential TEXT NOT NULL,
    key        TEXT NOT NULL,
    body_hash  BLOB NOT NULL,
    call_id    TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (credential, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE events (
    id      INTEGER PRIMARY KEY,
    at      INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    subject TEXT NOT NULL,
    data    BLOB NOT NULL
) STRICT;

CREATE TABLE nodes (
    node_id      TEXT PRIMARY KEY,
    info         BLOB NOT NULL,
    connected_at INTEGER NOT NULL,
    last_seen    INTEGER NOT NULL
) STRICT;

CREATE TABLE tokens (
    id         TEXT PRIMARY KEY,
    hash       BLOB NOT NULL UNIQUE,
    scopes     TEXT NOT NULL,
    node_id    TEXT,
    label      TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    revoked_at INTEGER
) STRICT;
""",
    """
CREATE TABLE transfers (
    seq           INTEGER PRIMARY KEY,
    id            TEXT NOT NULL UNIQUE,
    source        TEXT NOT NULL,
    destination   TEXT NOT NULL,
    agent_id      TEXT,
    credential    TEXT NOT NULL,
    state         TEXT NOT NULL,
    files         INTEGER,
    bytes_total   INTEGER,
    bytes_done    INTEGER NOT NULL,
    mime          TEXT,
    error_kind    TEXT,
    error_message TEXT,
    created_at    INTEGER NOT NULL,
    ended_at      INTEGER
) STRICT;
CREATE INDEX transfers_open ON transfers (id) WHERE ended_at IS NULL;
""",
    """
CREATE TABLE sessions (
    key               TEXT PRIMARY KEY,
    id                TEXT NOT NULL,
    agent_id          TEXT NOT NULL,
    kind              TEXT NOT NULL,
    parent_key        TEXT,
    title             TEXT NOT NULL,
    model             TEXT,
    thinking          TEXT,
    channel           BLOB,
    previous_ids      TEXT NOT NULL,
    created_at        INTEGER NOT NULL,
    updated_at        INTEGER NOT NULL,
    messages          INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    cost              REAL NOT NULL,
    context_tokens    INTEGER NOT NULL,
    compactions       INTEGER NOT NULL
) STRICT;
CREATE INDEX sessions_by_activity ON sessions (updated_at);

CREATE TABLE entries (
    seq               INTEGER PRIMARY KEY,
    session_key       TEXT NOT NULL,
    session_id        TEXT NOT NULL,
    run_id            TEXT,
    at                INTEGER NOT NULL,
    message           BLOB NOT NULL,
    model             TEXT,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    cost              REAL NOT NULL,
    keeps_from        INTEGER
) STRICT;
CREATE INDEX entries_of_session ON entries (session_key, session_id, seq);

CREATE TABLE runs (
    seq               INTEGER PRIMARY KEY,
    id                TEXT NOT NULL UNIQUE,
    session_key       TEXT NOT NULL,
    state             TEXT NOT NULL,
    origin            TEXT NOT NULL,
    credential        TEXT NOT NULL,
    scopes            TEXT NOT NULL,
    message           BLOB NOT NULL,
    options           BLOB NOT NULL,
    joined_to         TEXT,
    attempts          INTEGER NOT NULL,
    created_at        INTEGER NOT NULL,
    started_at        INTEGER,
    ended_at          INTEGER,
    reply             TEXT,
    error_kind        TEXT,
    error_message     TEXT,
    steps             INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    cached_tokens     INTEGER NOT NULL,
    cost              REAL NOT NULL
) STRICT;
CREATE INDEX runs_open ON runs (seq) WHERE ended_at IS NULL;
CREATE INDEX runs_of_session ON runs (session_key, seq);
CREATE INDEX runs_joined ON runs (joined_to) WHERE joined_to IS NOT NULL;
""",
    """
CREATE TABLE chats (
    seq        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL UNIQUE,
    session_id TEXT NOT NULL,
    user_id    TEXT NOT NULL,
    channel    TEXT NOT NULL,
    name       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    UNIQUE (session_id, user_id, channel)
) STRICT;

CREATE TABLE chat_messages (
    seq  INTEGER PRIMARY KEY,
    chat INTEGER NOT NULL REFERENCES chats (seq) ON DELETE CASCADE,
    role TEXT NOT NULL,
    text TEXT NOT NULL,
    at   INTEGER NOT NULL
) STRICT;
CREATE INDEX chat_messages_chat ON chat_messages (chat);
""",
    """
CREATE TABLE cron_jobs (
    id         TEXT PRIMARY KEY,
    agent_id   TEXT NOT NULL,
    hidden     INTEGER NOT NULL,
    enabled    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    cursor     INTEGER NOT NULL,
    floor      INTEGER NOT NULL,
    next_at    INTEGER,
    job        BLOB NOT NULL
) STRICT;
CREATE INDEX cron_due ON cron_jobs (next_at) WHERE enabled;

CREATE TABLE cron_slots (
    job         TEXT NOT NULL,
    slot        INTEGER NOT NULL,
    name        TEXT NOT NULL,
    agent_id    TEXT NOT NULL,
    status      TEXT NOT NULL,
    recorded_at INTEGER NOT NULL,
    cause       TEXT NOT NULL,
    holder      TEXT,
    beat        INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    late        INTEGER NOT NULL,
    since       INTEGER,
    started_at  INTEGER,
    ended_at    INTEGER,
    error       TEXT,
    summary     TEXT,
    session_key TEXT,
    PRIMARY KEY (job, slot)
) STRICT, WITHOUT ROWID;
CREATE INDEX cron_open ON cron_slots (slot) WHERE status IN ('waiting', 'running');
CREATE INDEX cron_ended ON cron_slots (job, ended_at) WHERE ended_at IS NOT NULL;
""",
    """
CREATE TABLE outbox (
    seq         INTEGER PRIMARY KEY,
    id          TEXT NOT NULL,
    channel     TEXT NOT NULL,
    account     TEXT NOT NULL,
    peer        TEXT NOT NULL,
    peer_kind   TEXT NOT NULL,
    parts       BLOB NOT NULL,
    media       BLOB NOT NULL,
    reply_to    TEXT,
    agent_id    TEXT NOT NULL,
    origin      TEXT NOT NULL,
    state       TEXT NOT NULL,
    parts_sent  INTEGER NOT NULL,
    attempts    INTEGER NOT NULL,
    next_at     INTEGER NOT NULL,
    error       TEXT,
    remote_id   TEXT,
    created_at  INTEGER NOT NULL,
    ended_at    INTEGER,
    UNIQUE (channel, account, peer, id)
) STRICT;
CREATE INDEX outbox_open ON outbox (seq) WHERE ended_at IS NULL;
CREATE INDEX outbox_by_id ON outbox (id);

CREATE TABLE awaited_replies (
    run_id     TEXT PRIMARY KEY,
    channel    TEXT NOT NULL,
    account    TEXT NOT NULL,
    peer       TEXT NOT NULL,
    peer_kind  TEXT NOT NULL,
    reply_to   TEXT,
    agent_id   TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    ended_at   INTEGER
) STRICT;
CREATE INDEX awaited_replies_open ON awaited_replies (created_at) WHERE ended_at IS NULL;

CREATE TABLE last_active (
    agent_id  TEXT PRIMARY KEY,
    channel   TEXT NOT NULL,
    account   TEXT NOT NULL,
    peer      TEXT NOT NULL,
    peer_kind TEXT NOT NULL,
    at        INTEGER NOT NULL
) STRICT;

CREATE TABLE pairings (
    channel      TEXT NOT NULL,
    account      TEXT NOT NULL,
    sender       TEXT NOT NULL,
    name         TEXT NOT NULL,
    code         TEXT NOT NULL,
    state        TEXT NOT NULL,
    peer         TEXT NOT NULL,
    first_text   TEXT NOT NULL,
    requested_at INTEGER NOT NULL,
    decided_at   INTEGER,
    PRIMARY KEY (channel, account, sender)
) STRICT, WITHOUT ROWID;

CREATE TABLE hooks (
    id         TEXT PRIMARY KEY,
    settings   BLOB NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE hook_posts (
    seq      INTEGER PRIMARY KEY,
    hook     TEXT NOT NULL,
    delivery TEXT,
    body     BLOB NOT NULL,
    at       INTEGER NOT NULL,
    run_id   TEXT,
    error    TEXT,
    ended_at INTEGER,
    UNIQUE (hook, delivery)
) STRICT;
CREATE INDEX hook_posts_open ON hook_posts (seq) WHERE ended_at IS NULL;
""",
    """
ALTER TABLE tokens ADD COLUMN tools TEXT NOT NULL DEFAULT '';
ALTER TABLE tokens ADD COLUMN nodes TEXT NOT NULL DEFAULT '';
ALTER TABLE tokens ADD COLUMN expires_at INTEGER;
""",
    """
ALTER TABLE tokens ADD COLUMN public_key BLOB;
""",
    """
ALTER TABLE outbox ADD COLUMN holder TEXT;
ALTER TABLE outbox ADD COLUMN beat INTEGER NOT NULL DEFAULT 0;
CREATE INDEX outbox_lane ON outbox (channel, account, peer, seq) WHERE ended_at IS NULL;
CREATE INDEX outbox_ended ON outbox (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX hook_posts_ended ON hook_posts (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX awaited_replies_ended ON awaited_replies (ended_at) WHERE ended_at IS NOT NULL;
""",
    """
CREATE TABLE fanouts (
    id         TEXT PRIMARY KEY,
    tool       TEXT NOT NULL,
    credential TEXT NOT NULL,
    nodes      BLOB NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE fanout_calls (
    fanout  TEXT NOT NULL,
    call_id TEXT NOT NULL,
    PRIMARY KEY (fanout, call_id)
) STRICT, WITHOUT ROWID;
""",
    SEALED,
    """
ALTER TABLE runs ADD COLUMN finish_reason TEXT;
ALTER TABLE runs ADD COLUMN handed BLOB;
CREATE INDEX runs_handing_over ON runs (session_key) WHERE handed IS NOT NULL;
""",
    """
CREATE TABLE parked (
    call_id    TEXT PRIMARY KEY,
    why        TEXT NOT NULL,
    credential BLOB NOT NULL,
    origins    TEXT NOT NULL,
    timeout_ms INTEGER NOT NULL,
    before     INTEGER,
    rule       TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE approvals (
    id          TEXT PRIMARY KEY,
    call_id     TEXT NOT NULL UNIQUE,
    hash        TEXT NOT NULL,
    rule        TEXT NOT NULL,
    reason      TEXT NOT NULL,
    request     BLOB NOT NULL,
    asked_at    INTEGER NOT NULL,
    deadline_at INTEGER NOT NULL,
    state       TEXT NOT NULL,
    decided_by  TEXT,
    decided_at  INTEGER,
    remark      TEXT
) STRICT, WITHOUT ROWID;
CREATE INDEX approvals_by_time ON approvals (asked_at);
""",
    """
CREATE TABLE contents (
    digest BLOB NOT NULL UNIQUE,
    data   BLOB NOT NULL
) STRICT;

CREATE TABLE run_attempts (
    run_id     TEXT NOT NULL,
    attempt    INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    last_entry INTEGER NOT NULL,
    settings   BLOB NOT NULL,
    PRIMARY KEY (run_id, attempt)
) STRICT, WITHOUT ROWID;

CREATE TABLE asked (
    run_id   TEXT NOT NULL,
    number   INTEGER NOT NULL,
    attempt  INTEGER NOT NULL,
    prompt   BLOB NOT NULL,
    count    INTEGER NOT NULL,
    messages BLOB NOT NULL,
    tools    BLOB NOT NULL,
    specs    BLOB NOT NULL,
    reply    BLOB,
    PRIMARY KEY (run_id, number)
) STRICT, WITHOUT ROWID;
""",
    "ALTER TABLE tokens ADD COLUMN last_used_at INTEGER;",
    """
CREATE TABLE browser_sessions (
    id           TEXT PRIMARY KEY,
    cookie_hash  BLOB NOT NULL UNIQUE,
    page_hash    BLOB NOT NULL,
    owner_hash   BLOB NOT NULL,
    created_at   INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    address      TEXT NOT NULL,
    user_agent   TEXT NOT NULL
) STRICT, WITHOUT ROWID;
""",
    """
ALTER TABLE calls ADD COLUMN on_behalf_of TEXT;
ALTER TABLE runs ADD COLUMN asker BLOB;
CREATE INDEX runs_of_credential ON runs (credential, session_key);
ALTER TABLE hooks ADD COLUMN made_by TEXT NOT NULL DEFAULT 'owner';
""",
    "CREATE INDEX events_pruned ON events (id) WHERE kind = 'journal.pruned';",
    """
CREATE TABLE end_orders (
    node_id    TEXT NOT NULL,
    call_id    TEXT NOT NULL,
    reason     TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (node_id, call_id)
) STRICT, WITHOUT ROWID;
""",
    "ALTER TABLE tokens ADD COLUMN made_by TEXT NOT NULL DEFAULT 'owner';",
    "ALTER TABLE chats ADD COLUMN made_by TEXT NOT NULL DEFAULT 'owner';",
    # Which credential made the link of an earlier session is not known, so every browser signs in again.
    """
DELETE FROM browser_sessions;
ALTER TABLE browser_sessions ADD COLUMN made_by TEXT NOT NULL DEFAULT 'owner';
""",
    """
CREATE TABLE standing_approvals (
    id           TEXT PRIMARY KEY,
    tool         TEXT NOT NULL,
    node_id      TEXT,
    args         BLOB NOT NULL,
    credential   TEXT NOT NULL,
    on_behalf_of TEXT,
    origins      TEXT NOT NULL,
    rule         TEXT NOT NULL,
    approval_id  TEXT NOT NULL,
    made_by      TEXT NOT NULL,
    created_at   INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
""",
    # Tokens from before profiles keep the full list of tools.
    "ALTER TABLE tokens ADD COLUMN profile TEXT NOT NULL DEFAULT 'full';",
    """
CREATE TABLE responses (
    id         TEXT PRIMARY KEY,
    run_id     TEXT NOT NULL,
    credential TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    facts      BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX responses_by_age ON responses (created_at);
""",
    """
CREATE TABLE mcp_servers (
    name       TEXT PRIMARY KEY,
    settings   BLOB NOT NULL,
    created_at INTEGER NOT NULL,
    created_by TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE mcp_tools (
    server      TEXT NOT NULL,
    tool        TEXT NOT NULL,
    digest      TEXT NOT NULL,
    description TEXT NOT NULL,
    accepted_at INTEGER NOT NULL,
    accepted_by TEXT NOT NULL,
    PRIMARY KEY (server, tool)
) STRICT, WITHOUT ROWID;
""",
    """
CREATE TABLE mcp_tasks (
    call_id    TEXT PRIMARY KEY,
    credential TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX mcp_tasks_of ON mcp_tasks (credential, call_id);
CREATE INDEX mcp_tasks_by_age ON mcp_tasks (expires_at);
""",
    """
CREATE TABLE secrets (
    name         TEXT PRIMARY KEY,
    value        BLOB NOT NULL,
    nodes        TEXT NOT NULL,
    tools        TEXT NOT NULL,
    made_by      TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    last_used_at INTEGER,
    last_call    TEXT
) STRICT;
""",
    """
CREATE TABLE oauth_clients (
    id            TEXT PRIMARY KEY,
    client_id     TEXT NOT NULL,
    name          TEXT NOT NULL,
    redirect_uris BLOB NOT NULL,
    auth_method   TEXT NOT NULL,
    secret_hash   BLOB,
    created_at    INTEGER NOT NULL,
    consented_at  INTEGER
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX oauth_clients_by_name ON oauth_clients (client_id);
CREATE TABLE oauth_grants (
    token_id   TEXT PRIMARY KEY,
    client     TEXT NOT NULL,
    resource   TEXT NOT NULL,
    scope      TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE oauth_secrets (
    hash       BLOB PRIMARY KEY,
    kind       TEXT NOT NULL,
    client     TEXT NOT NULL,
    token_id   TEXT,
    facts      BLOB NOT NULL,
    expires_at INTEGER NOT NULL,
    used_at    INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX oauth_secrets_by_expiry ON oauth_secrets (expires_at);
""",
    """
CREATE TABLE one_time_codes (
    seq        INTEGER PRIMARY KEY,
    hash       BLOB NOT NULL UNIQUE,
    kind       TEXT NOT NULL,
    facts      BLOB NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;
""",
    """
CREATE TABLE budget_limits (
    subject    TEXT NOT NULL,
    unit       TEXT NOT NULL,
    period     TEXT NOT NULL,
    amount     INTEGER NOT NULL,
    made_by    TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (subject, unit)
) STRICT, WITHOUT ROWID;
CREATE TABLE budget_use (
    subject    TEXT NOT NULL,
    unit       TEXT NOT NULL,
    period     TEXT NOT NULL,
    used       INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (subject, unit, period)
) STRICT, WITHOUT ROWID;
CREATE TABLE budget_holds (
    id         TEXT NOT NULL,
    subject    TEXT NOT NULL,
    unit       TEXT NOT NULL,
    period     TEXT NOT NULL,
    amount     INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (id, subject, unit)
) STRICT, WITHOUT ROWID;
CREATE INDEX budget_holds_of ON budget_holds (subject, unit, period);
CREATE TABLE budget_machines (
    subject TEXT NOT NULL,
    period  TEXT NOT NULL,
    node_id TEXT NOT NULL,
    used_at INTEGER NOT NULL,
    PRIMARY KEY (subject, period, node_id)
) STRICT, WITHOUT ROWID;
""",
    # The messages of chats are entries of sessions; `chat_messages` is no longer used.
    """
ALTER TABLE chats ADD COLUMN session_key TEXT NOT NULL DEFAULT '';
ALTER TABLE chats ADD COLUMN first_entry INTEGER NOT NULL DEFAULT 0;
CREATE INDEX chats_to_move ON chats (seq) WHERE session_key = '';
""",
    # What nodes signed about calls.
    """
CREATE TABLE receipts (
    call_id   TEXT PRIMARY KEY,
    node_key  TEXT NOT NULL,
    statement TEXT NOT NULL,
    signature TEXT NOT NULL
) STRICT, WITHOUT ROWID;
""",
    # The hosts whose requests get the secret as a header, by the egress proxies of nodes.
    """
ALTER TABLE secrets ADD COLUMN hosts TEXT NOT NULL DEFAULT '';
ALTER TABLE secrets ADD COLUMN header TEXT NOT NULL DEFAULT '';
""",
    # Where a call that is approved permanently works: in the workspace of an agent (empty: not stored) and, for a
    # message, from a session.
    """
ALTER TABLE standing_approvals ADD COLUMN agent_id TEXT NOT NULL DEFAULT '';
ALTER TABLE standing_approvals ADD COLUMN session_key TEXT;
""",
)
