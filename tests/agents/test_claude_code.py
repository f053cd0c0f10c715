"""Claude Code mends a file: a shell call, an edit and a plain answer, through `/v1/messages` and without a network."""

from __future__ import annotations

from pathlib import Path

from tests.agents.running import require_cached, run_agent
from tests.scripted.running import call, run_script

TASK = "Mend the greeting in greeting.txt."
ANSWER = "The greeting is right now."
VARIABLES = {
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": "demo",
    "ANTHROPIC_SMALL_FAST_MODEL": "demo",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
COMMAND = ("-p", TASK, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash,Read,Edit")


def test_claude_code_finishes_a_task(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    file = work / "greeting.txt"
    file.write_text("hello wrold\n")
    edit = {"file_path": str(file), "old_string": "wrold", "new_string": "world"}
    script = (
        (TASK, "<think>I look at its size.</think>" + call("Bash", command="wc -c greeting.txt", description="Count")),
        ("12 greeting.txt", call("Read", file_path=str(file))),  # it edits what it has read
        ("hello wrold", call("Edit", **edit)),
        ("has been updated", ANSWER),
    )
    with run_script(tmp_path, script) as server:
        events = run_agent(
            "@anthropic-ai/claude-code/cli-wrapper.cjs", COMMAND, work, home, **VARIABLES, ANTHROPIC_BASE_URL=server.url
        )
    messages = [event["message"] for event in events if event["type"] == "assistant"]
    blocks = [block for message in messages for block in message["content"]]
    kinds = ["thinking", "tool_use", "tool_use", "tool_use", "text"]
    assert [block["type"] for block in blocks] == kinds, events
    results = [part["content"] for event in events if event["type"] == "user" for part in event["message"]["content"]]
    assert results[0] == "12 greeting.txt" and file.read_text() == "hello world\n"
    assert (events[-1]["subtype"], events[-1]["result"]) == ("success", ANSWER)
    usages = {message["id"]: message["usage"] for message in messages}
    assert len(usages) == len(script)
    cached = [(usage["input_tokens"], usage["cache_read_input_tokens"]) for usage in usages.values()]
    require_cached([(new + read, read) for new, read in cached])
