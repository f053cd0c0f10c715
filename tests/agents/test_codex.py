"""Codex mends a file: a shell call, an edit and a plain answer, through `/v1/responses` and without a network."""

from __future__ import annotations

import json
from pathlib import Path

from tests.agents.running import require_cached, run_agent
from tests.scripted.running import call, run_script

TASK = "Mend the greeting in greeting.txt."
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: greeting.txt
@@
-hello wrold
+hello world
*** End Patch
EOF"""
ANSWER = "The greeting is right now."
SCRIPT = (
    (TASK, "<think>I look at it first.</think>" + call("exec_command", cmd="cat greeting.txt")),
    ("hello wrold", call("exec_command", cmd=PATCH)),
    ("Updated the following files", ANSWER),
)
CONFIG = """model = "demo"
model_provider = "jaxserve"
model_context_window = 65536

[model_providers.jaxserve]
name = "jaxserve"
base_url = "{url}/v1"
wire_api = "responses"
"""
COMMAND = ("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK)


def test_codex_finishes_a_task(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    work.mkdir()
    (work / "greeting.txt").write_text("hello wrold\n")
    with run_script(tmp_path, SCRIPT) as server:
        (home / ".codex" / "config.toml").write_text(CONFIG.format(url=server.url))
        events = run_agent("@openai/codex/bin/codex.js", COMMAND, work, home)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    kinds = [item["type"] for item in items if item["type"] != "error"]  # it warns that it does not know the model
    assert kinds == ["command_execution", "file_change", "agent_message"], events
    command, change, message = [item for item in items if item["type"] in kinds]
    assert (command["exit_code"], command["aggregated_output"]) == (0, "hello wrold\n")
    assert change["status"] == "completed" and (work / "greeting.txt").read_text() == "hello world\n"
    assert message["text"] == ANSWER and events[-1]["usage"]["reasoning_output_tokens"] > 0
    require_cached(read_usages(home))


def read_usages(home: Path) -> list[tuple[int, int]]:
    """Returns what the session's file says of each request: the tokens of its prompt, and the cached ones."""
    (session,) = (home / ".codex" / "sessions").rglob("rollout-*.jsonl")
    payloads = [json.loads(line)["payload"] for line in session.read_text().splitlines()]
    usages = [each["info"]["last_token_usage"] for each in payloads if each.get("type") == "token_count"]
    assert len(usages) == len(SCRIPT)
    return [(usage["input_tokens"], usage["cached_input_tokens"]) for usage in usages]
