"""Which nodes an engine has: from options, a LeaderWorkerSet's variables, or JAX's detection; and rank 0's options."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.identity import list_chosen_options
from jaxserve.engine.nodes import adopt_options, find_nodes, refuse_with_nodes, resolve_nodes
from jaxserve.errors import ConfigError
from jaxserve.parallel_options import NodeOptions


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_anything_there_is_one_host() -> None:
    nodes = find_nodes(EngineConfig()).nodes
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr, nodes.headless) == (1, 0, "127.0.0.1", False)


def test_a_pod_of_a_leader_worker_set_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, LWS_GROUP_SIZE="4", LWS_WORKER_INDEX="3", LWS_LEADER_ADDRESS="engine-0.engine.default")
    nodes = find_nodes(EngineConfig()).nodes
    assert (nodes.nnodes, nodes.node_rank, nodes.headless) == (4, 3, True)
    assert nodes.master_addr == "engine-0.engine.default"


def test_options_come_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, LWS_GROUP_SIZE="4", LWS_WORKER_INDEX="3", LWS_LEADER_ADDRESS="engine-0")
    config = EngineConfig.from_options(nnodes=2, node_rank=1, master_addr="10.0.0.1")
    nodes = find_nodes(config).nodes
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr) == (2, 1, "10.0.0.1")


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, LWS_GROUP_SIZE="four")
    with pytest.raises(ConfigError, match=r"LWS_GROUP_SIZE: .*got 'four'"):
        find_nodes(EngineConfig())


def test_tasks_of_slurm_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(
        monkeypatch,
        SLURM_JOB_ID="17",
        SLURM_STEP_NODELIST="gpu[07-08]",
        SLURM_NTASKS="2",
        SLURM_PROCID="1",
        SLURM_LOCALID="0",
        SLURM_STEP_NUM_NODES="2",
    )
    nodes = find_nodes(EngineConfig()).nodes
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr, nodes.headless) == (2, 1, "gpu07", True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nnodes": 2, "node_rank": 2}, "node_rank: .*nnodes=2, got 2"),
        ({"headless": True}, "headless: rank 0"),
        ({"nnodes": 2, "health_port": 8001}, "health_port: rank 0"),
    ],
)
def test_what_contradicts_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_nodes(NodeOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nnodes": 0}, "nnodes: .*at least 1"),
        ({"master_port": 65535}, "master_port: .*65534"),
        ({"step_timeout": 0}, "step_timeout: .*above 0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig.from_options(**options)


def test_the_host_tier_needs_one_host() -> None:
    config = find_nodes(EngineConfig.from_options(nnodes=2, kv_offloading_size=1.0))
    with pytest.raises(ConfigError, match="nnodes=2"):
        refuse_with_nodes(config)


def test_a_follower_takes_the_leaders_options_and_keeps_its_paths() -> None:
    leader = EngineConfig.from_options(model="/a", max_num_seqs=4, tensor_parallel_size=4, seed=3)
    own = EngineConfig.from_options(model="/b", max_num_seqs=4, compilation_cache_dir="/mine", nnodes=2, node_rank=1)
    adopted = adopt_options(own, list_chosen_options(leader))
    assert adopted.nodes == own.nodes and adopted.compile.compilation_cache_dir == "/mine"
    assert adopted.model.model == "/b" and adopted.model.seed == 3
    assert adopted.parallel.tensor_parallel_size == 4


def test_an_option_given_here_stays_for_the_comparison() -> None:
    adopted = adopt_options(EngineConfig.from_options(max_num_seqs=8), {"max_num_seqs": 4})
    assert list_chosen_options(adopted) == {"max_num_seqs": 8}
