"""Traces: five formats, told apart by themselves; prompts share what the trace says and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.request import ServiceTier, Tenant
from jaxserve.tools.simulation.traces import PACKAGED_TRACES, TraceRequest, make_requests, read_trace

TRACES = Path(__file__).parents[4] / "shared" / "traces"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
"""
MOONCAKE = [
    {"timestamp": 27482, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]},
    {"timestamp": 30535, "input_length": 1030, "output_length": 7, "hash_ids": [46, 47, 48]},
    {"timestamp": 30536, "input_length": 600, "output_length": 7, "hash_ids": [47, 46]},
]


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def write_lines(folder: Path, *records: object) -> Path:
    return write(folder, "\n".join(map(json.dumps, records)) + "\n\n")


def test_azure_is_read_by_arrival(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, AZURE))
    assert (first.arrival_time, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 374, 44)
    assert (second.num_prompt_tokens, second.num_output_tokens) == (396, 109)
    assert second.arrival_time == pytest.approx(4.314579, abs=1e-6)
    prompts = [request.prompt_token_ids for request in make_requests([first, second])]
    assert [len(prompt) for prompt in prompts] == [374, 396] and not set(prompts[0]) & set(prompts[1])


@pytest.mark.parametrize("name", PACKAGED_TRACES)
def test_traces_of_the_package_are_read_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_trace(name)
    assert len(found) == 500 and found[0].arrival_time == 0
    with pytest.raises(ConfigError, match=r"^trace: azure-chats cannot be read: .*; the package has azure-chat, "):
        read_trace("azure-chats")


def test_gaps_become_arrivals(tmp_path: Path) -> None:
    path = write(tmp_path, "gap_seconds,prompt_tokens,output_tokens\n0.5,91,16\n0.25,381,84\n0,7,1\n")
    assert read_trace(path) == [TraceRequest(0.0, 91, 16), TraceRequest(0.25, 381, 84), TraceRequest(0.25, 7, 1)]
    with pytest.raises(ConfigError, match="line 2: could not convert"):
        read_trace(write(tmp_path, "gap_seconds,prompt_tokens,output_tokens\nx,91,16\n"))


def test_mooncake_blocks_are_equal_where_their_hashes_are(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path, *MOONCAKE))
    assert [request.arrival_time for request in trace] == pytest.approx([0.0, 3.053, 3.054])
    first, second, third = (request.prompt_token_ids for request in make_requests(trace))
    assert (len(first), len(second), len(third)) == (700, 1030, 600)
    assert first == second[:700] and first[:512] != third[:512] and first[512:600] == third[:88]


def test_the_servers_own_log_is_read(tmp_path: Path) -> None:
    def answer(time: str, seconds: float, **more: object) -> dict[str, object]:
        return {"time": f"2026-11-22T10:00:{time}+00:00", "logger": "jaxserve.access", "seconds": seconds} | more

    path = write_lines(
        tmp_path,
        {"time": "2026-11-22T09:59:00.000+00:00", "level": "info", "logger": "jaxserve.server", "message": "ready"},
        answer("04.000", 3.0, prompt_tokens=20, output_tokens=9, tenant="blue", service_tier="flex"),
        answer("03.500", 0.5, prompt_tokens=7, output_tokens=2),
        answer("09.000", 0.001),
        answer("09.000", 0.1, prompt_tokens=7, output_tokens=0),
    )
    assert read_trace(path) == [
        TraceRequest(0.0, 20, 9, tenant="blue", service_tier=ServiceTier.FLEX),
        TraceRequest(2.0, 7, 2),
    ]


def test_answers_of_run_batch_arrive_at_once(tmp_path: Path) -> None:
    chat = {"status_code": 200, "body": {"usage": {"prompt_tokens": 5, "completion_tokens": 3}}}
    new = {"status_code": 200, "body": {"usage": {"input_tokens": 6, "output_tokens": 4}}}
    failed = {"status_code": 400, "body": {"error": {"message": "no"}}}
    path = write_lines(tmp_path, *({"id": "x", "response": each} for each in (chat, new, failed, None)))
    assert read_trace(path) == [TraceRequest(0.0, 5, 3), TraceRequest(0.0, 6, 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "in no known format"),
        ("a,b\n1,2\n", "Azure's CSV"),
        ('{"prompt": 1}\n', "in no known format"),
        (AZURE + "2023-11-16 18:15:50,many,1\n", "line 4: invalid literal"),
        (AZURE + "2023-11-16 18:15:50,0,1\n", "line 4: .*prompt"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (json.dumps({"hash_ids": [1], "timestamp": 0, "input_length": 513, "output_length": 1}), "do not cover"),
        (json.dumps({"hash_ids": [1], "input_length": 512, "output_length": 1}), "line 1: 'timestamp' is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_trace(write(tmp_path, text))
    assert caught.value.field == "trace"


OWN = "gap_seconds,prompt_tokens,output_tokens\n"
LOGGED = {"time": "2026-11-22T10:00:00+00:00", "logger": "jaxserve.access", "seconds": 1.0, "prompt_tokens": 2}
LOGGED |= {"output_tokens": 3}


@pytest.mark.parametrize("time", [1e308, 1e30, -1.0, float("nan"), float("inf"), "1", None, True, [1], 10**400])
def test_times_out_of_range_are_named_in_every_format(tmp_path: Path, time: object) -> None:
    lines = [json.dumps(MOONCAKE[0] | {"timestamp": time}), json.dumps(LOGGED | {"seconds": time})]
    for line in (
        lines if time is None else [*lines, f"{OWN}{time},1,1\n"] if time != "1" and time is not True else lines
    ):
        with pytest.raises(ConfigError, match=r"^trace: .*, line [12]: ") as caught:
            read_trace(write(tmp_path, line))
        assert caught.value.field == "trace" and len(str(caught.value)) < 400


@pytest.mark.parametrize("count", [-1, 2**24 + 1, 10**18, 1.5, float("nan"), float("inf"), "7", None, True, {}])
def test_lengths_out_of_range_are_named_in_every_format(tmp_path: Path, count: object) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    for record in (
        *(MOONCAKE[0] | {name: count} for name in ("input_length", "output_length")),
        MOONCAKE[0] | {"hash_ids": [46, -1 if isinstance(count, int) else count]},
        *(LOGGED | {name: count} for name in ("prompt_tokens", "output_tokens") if count is not None),
        *({"response": {"body": {"usage": usage | {name: count}}}} for name in usage),
    ):
        with pytest.raises(ConfigError, match="line 1: "):
            read_trace(write_lines(tmp_path, record))


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,5,5\n9999-12-31 23:59:59,5,5\n",
        f"{OWN}1,1,1\n1e17,1,1\n",
        json.dumps(MOONCAKE[0]) + "\n" + json.dumps(MOONCAKE[1] | {"timestamp": 1e17}),
    ],
)
def test_a_trace_of_more_than_a_year_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"at most 3\.16e\+07 s"):
        read_trace(write(tmp_path, text))


def test_a_deep_line_is_no_recursion_error(tmp_path: Path) -> None:
    for text in ("[" * 100_000, json.dumps(MOONCAKE[0]) + "\n" + "[" * 100_000, json.dumps(MOONCAKE[0]) + "\n[]"):
        with pytest.raises(ConfigError):
            read_trace(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv"):
        read_trace(tmp_path / "none.csv")


def test_arrivals_can_be_scaled_and_tenants_are_kept() -> None:
    trace = [TraceRequest(0.0, 1, 1, tenant="a"), TraceRequest(6.0, 1, 1, tenant="b", priority=4)]
    first, second = make_requests(trace, rate_scale=2.0)
    assert (first.tenant, second.tenant, second.priority, second.arrival_time) == (Tenant("a"), Tenant("b"), 4, 3.0)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not in ../shared/traces")
@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366, 1155, 211),
        ("AzureLLMInferenceTrace_code.csv", 8_819, 2048, 28),
        ("mooncake_conversation.jsonl", 12_031, 12_035, 343),
        ("mooncake_synthetic.jsonl", 3_993, 15_325, 149),
    ],
)
def test_published_means(name: str, count: int, prompt: int, output: int) -> None:
    trace = read_trace(TRACES / name)
    assert len(trace) == count
    assert round(sum(request.num_prompt_tokens for request in trace) / count) == pytest.approx(prompt, abs=1)
    assert round(sum(request.num_output_tokens for request in trace) / count) == pytest.approx(output, abs=1)
