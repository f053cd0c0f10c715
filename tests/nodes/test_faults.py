"""The group fails as one: whoever is lost, clients are told and no process is left."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.nodes.nodes import FLAGS, ROOT, TOKEN, Node, end, find_ports, launch, launch_pair, run_pair

MODEL = "demo"
SMALL = ("--max-num-seqs", "1")  # fewer programs: what is lost does not depend on them
GONE_SECONDS = 2.0
STEP_TIMEOUT = 3.0


def stream(node: Node, heard: list[str], begun: threading.Event) -> None:
    """Reads an endless answer and keeps its lines; a connection that is cut is a line, too."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 250, "ignore_eos": True, "stream": True, "temperature": 1}
    try:
        with httpx.stream("POST", f"{node.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                heard.append(line)
                if len(heard) > 4:
                    begun.set()
    except httpx.HTTPError as error:
        heard.append(f"error: {error!r}")


def wait_until_gone(nodes: list[Node], seconds: float) -> None:
    """Asserts that all processes end in time with a failure, and leave no port."""
    deadline = time.monotonic() + seconds
    for node in nodes:
        status = node.process.wait(max(0.1, deadline - time.monotonic()))
        assert status != 0, node.log
    for node in nodes:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", node.port)) != 0


def lose(nodes: list[Node], victim: int, kind: signal.Signals) -> list[str]:
    """Sends a signal to one node in the middle of an answer; returns what the client heard."""
    heard: list[str] = []
    begun = threading.Event()
    reading = threading.Thread(target=stream, args=(nodes[0], heard, begun))
    reading.start()
    assert begun.wait(60), nodes[0].log
    nodes[victim].process.send_signal(kind)
    others = [node for index, node in enumerate(nodes) if index != victim]
    is_stopped = kind == signal.SIGSTOP
    wait_until_gone(others, GONE_SECONDS + (STEP_TIMEOUT if is_stopped else 0.0))
    if is_stopped:
        nodes[victim].process.send_signal(signal.SIGCONT)
    wait_until_gone([nodes[victim]], GONE_SECONDS)
    reading.join(20)
    assert not reading.is_alive()
    return heard


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize(
    ("victim", "kind"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["kill-1", "kill-0", "stop-1", "stop-0"],
)
def test_the_loss_of_a_host_ends_all(victim: int, kind: signal.Signals, turn: int) -> None:
    with run_pair(MODEL, *SMALL, "--step-timeout", str(STEP_TIMEOUT)) as nodes:
        heard = lose(nodes, victim, kind)
        if victim == 1:
            assert any('"error"' in line for line in heard), heard[-3:]
            assert any("rank 1: " in line for line in nodes[0].lines), nodes[0].log
        else:
            assert any('"error"' in line or line.startswith("error: ") for line in heard), heard[-3:]
            # JAX's coordinator ends with rank 0, and JAX may end the others before they can say more.
            named = ("rank 0: ", "JAX distributed service detected fatal errors")
            assert any(text in line for line in nodes[1].lines for text in named), nodes[1].log


def test_rank_0_drains_and_all_end_well() -> None:
    with run_pair(MODEL, *SMALL) as nodes:
        heard: list[str] = []
        begun = threading.Event()
        reading = threading.Thread(target=stream, args=(nodes[0], heard, begun))
        reading.start()
        assert begun.wait(60), nodes[0].log
        for node in (nodes[1], nodes[0]):  # a pod's signal reaches all; only rank 0 acts on it
            node.process.send_signal(signal.SIGTERM)
        assert [node.process.wait(30) for node in nodes] == [0, 0], nodes[1].log
        reading.join(20)
        assert any("[DONE]" in line for line in heard)
        assert not any('"error"' in line for line in heard)


def wait_for_failures(nodes: list[Node], *texts: str) -> None:
    """Asserts that the processes fail, each with its text in the log."""
    try:
        assert all(node.process.wait(120) != 0 for node in nodes)
        time.sleep(0.2)  # for the last lines to be read
        for node, text in zip(nodes, texts, strict=True):
            assert text in node.log, node.log
    finally:
        end(nodes)


def test_another_token_is_refused_at_both_ends() -> None:
    nodes = launch_pair(MODEL, "--init-timeout", "8", tokens=(TOKEN, "another"))
    other = "a node that calls itself rank 1 has another token"
    wait_for_failures(nodes, "rank 1 did not come within 8 s", "JAXSERVE_CLUSTER_TOKEN: is another one at rank 0")
    assert other in nodes[0].log


def test_another_option_is_refused_at_both_ends() -> None:
    master, _, api = find_ports(3)
    common = (MODEL, "-tp", "4", "--nnodes", "2", "--master-port", str(master))
    nodes = [
        launch(*common, "--port", str(api), "--max-num-seqs", "4", port=api, devices=2),
        launch(*common, "--node-rank", "1", "--max-num-seqs", "8", port=api, devices=2),
    ]
    text = "options.max_num_seqs: is 4 at rank 0 and 8 at rank 1; it must be the same on all nodes"
    wait_for_failures(nodes, text, text)


def test_other_weights_are_refused_before_they_are_read(tmp_path: Path) -> None:
    source, copy = ROOT / "jaxserve" / "demo", tmp_path / "demo"
    copy.mkdir()
    for file in source.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-5] ^= 1
    weights.write_bytes(changed)
    master, _, api = find_ports(3)
    common = ("-tp", "4", "--nnodes", "2", "--master-port", str(master))
    nodes = [
        launch("demo", *common, "--port", str(api), port=api, devices=2),
        launch(str(copy), *common, "--node-rank", "1", port=api, devices=2),
    ]
    wait_for_failures(nodes, "weights: is ", "weights: is ")
    assert not any("Loaded weights" in line for node in nodes for line in node.lines)


def test_devices_that_are_left_out_are_refused() -> None:
    master, _, api = find_ports(3)
    common = (MODEL, "-tp", "2", "--nnodes", "2", "--master-port", str(master))
    nodes = [
        launch(*common, "--port", str(api), port=api, devices=2),
        launch(*common, "--node-rank", "1", port=api, devices=2),
    ]
    text = "tensor_parallel_size: 2 is not possible with 4 device(s) on 2 nodes; use 4, all of them"
    wait_for_failures(nodes, text, text)


def test_garbage_at_the_port_costs_nothing() -> None:
    master, _, api, probes = find_ports(4)
    common = (MODEL, "-tp", "4", "--nnodes", "2", "--master-port", str(master), *FLAGS)
    leader = launch(*common, "--port", str(api), port=api, devices=2)
    follower: list[Node] = []
    strangers = []
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                strangers.append(socket.create_connection(("127.0.0.1", master), 1))
                break
            except OSError:
                time.sleep(0.05)
        strangers[0].sendall(os.urandom(512))
        strangers += [socket.create_connection(("127.0.0.1", master), 1) for _ in range(3)]  # and say nothing
        follower = [
            launch(*common, "--node-rank", "1", "--health-port", str(probes), port=probes, devices=2),
        ]
        leader.wait_until_ready()
        answer = httpx.post(
            f"{leader.url}/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 4}, timeout=60
        )
        assert answer.status_code == 200
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", master), 1)  # closed once all are here
    finally:
        for each in strangers:
            each.close()
        end([leader, *follower])
