"""The system prompt, the list of skills, and their limits."""

from __future__ import annotations

import pytest

from farhand.agent.prompt import LONGEST_FILE, LONGEST_FILES, Machine, PromptParts, fitted, system_prompt, truncated
from farhand.agent.skills import LONGEST_LIST, PromptSkill, listed

PARTS = PromptParts(
    workspace="/home/me/agents/main",
    files={
        "SOUL.md": "Be kind.",
        "AGENTS.md": "Never delete.",
        "USER.md": "Ada",
        "MEMORY.md": "likes tea",
        "x.md": "no",
    },
    skills=(PromptSkill("deploy", "How we deploy.", "skills/deploy/SKILL.md"),),
    machines=(Machine("server", "linux"), Machine("laptop", "macos", ("Bash", "Read"))),
    further_tools="- gsv__: Cron",
    date="2026-11-16 (UTC)",
)


def test_it_tells_the_files_the_skills_and_the_machines() -> None:
    prompt = system_prompt(PARTS)
    for reported in (
        "### SOUL.md\nBe kind.",
        "### AGENTS.md\nNever delete.",
        "### USER.md\nAda",
        "### MEMORY.md\nlikes tea",
        "- deploy: How we deploy. (skills/deploy/SKILL.md)",
        "- laptop (macos): Bash, Read\n- server (linux)",
        "- gsv__: Cron",
        "/home/me/agents/main",
    ):
        assert reported in prompt
    assert "x.md" not in prompt
    assert "Heartbeat" not in prompt


def test_the_same_parts_give_the_same_bytes_and_what_changes_comes_last() -> None:
    assert system_prompt(PARTS) == system_prompt(PARTS)
    tomorrow = system_prompt(
        PromptParts(**{**{f: getattr(PARTS, f) for f in PARTS.__struct_fields__}, "date": "2026-11-17 (UTC)"})
    )
    today = system_prompt(PARTS)
    same = next(n for n, (a, b) in enumerate(zip(today, tomorrow, strict=True)) if a != b)
    assert today[:same].endswith("## Date\nToday is 2026-11-1")


def test_sections_without_content_are_left_out() -> None:
    prompt = system_prompt(PromptParts())
    for name in ("Skills", "Workspace", "Workspace Files", "Machines", "Further Tools", "Date"):
        assert f"## {name}\n" not in prompt


def test_memory_is_in_the_prompt_of_the_owners_own_session_only() -> None:
    shared = PromptParts(files=PARTS.files, private=False)
    assert "likes tea" not in system_prompt(shared)
    assert "Never delete." in system_prompt(shared)


def test_files_of_other_agents_workspaces_are_described_by_their_meaning() -> None:
    files = {
        "TOOLS.md": "the camera is cam1",
        "BOOTSTRAP.md": "ask for a name",
        "BOOT.md": "greet",
        "AGENTS.md": "rules",
    }
    own = system_prompt(PromptParts(files=files))
    for reported in (
        "### TOOLS.md\nthe camera",
        "### BOOTSTRAP.md\nask for a name",
        "### BOOT.md\ngreet",
        "delete the file",
    ):
        assert reported in own
    shared = system_prompt(PromptParts(files=files, private=False))
    assert "the camera" in shared and "ask for a name" not in shared and "greet" not in shared
    child = system_prompt(PromptParts(files=files, mode="minimal"))
    assert "rules" in child and "the camera" in child and "ask for a name" not in child
    assert "delete the file" not in system_prompt(PromptParts())


def test_a_sub_agent_gets_little() -> None:
    prompt = system_prompt(
        PromptParts(mode="minimal", files=PARTS.files, skills=PARTS.skills, machines=PARTS.machines, workspace="/w")
    )
    assert "You are a sub-agent" in prompt
    assert "Never delete." in prompt
    for left_out in ("Be kind.", "deploy", "laptop", "tea"):
        assert left_out not in prompt


def test_heartbeats_have_one_answer() -> None:
    assert "HEARTBEAT_OK" in system_prompt(PromptParts(files={"HEARTBEAT.md": "check the backup"}))


@pytest.mark.parametrize("size", [200, 201, 999, 1_000, 1_168, 1_169, 9_999, 123_456])
def test_a_long_text_is_cut_to_exactly_the_limit(size: int) -> None:
    text = "".join(chr(97 + n % 26) for n in range(size))
    cut = truncated(text, 200)
    assert len(cut) == 200
    if size > 200:
        head, _, rest = cut.partition("\n...[truncated ")
        missing, _, tail = rest.partition(" chars]...\n")
        assert text.startswith(head) and len(head) == 140
        assert text.endswith(tail)
        assert len(head) + len(tail) + int(missing) == size


def test_files_are_kept_within_the_limits() -> None:
    files = {f"{n}.md": "x" * (60_000 if n else 50) for n in range(9)}
    fit = fitted(files)
    assert all(len(text) <= LONGEST_FILE for text in fit.values())
    assert sum(map(len, fit.values())) <= LONGEST_FILES
    assert fit["0.md"] == "x" * 50


def test_the_list_of_skills_keeps_its_budget() -> None:
    lines = listed(PromptSkill(f"s{n:03}", "word " * 200, f"skills/s{n:03}/SKILL.md") for n in reversed(range(160)))
    assert len(lines) <= LONGEST_LIST + 40
    assert lines.startswith("- s000: word")
    assert "s149" in lines
    assert lines.endswith("(10 more are not listed)")
