"""The arguments of the application for Ray Serve, and how many replicas it wants; Ray itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.cluster.ray_options import read_arguments
from jaxserve.tools.cluster.ray_scaling import MOST_SECONDS, QueueTimePolicy


def test_texts_of_the_command_line_become_options() -> None:
    engine, serving, scaling = read_arguments(
        {"model": "demo", "max_num_seqs": "8", "api_key": '["a-key-of-eight"]', "max_replicas": "4", "router": "prefix"}
    )
    assert engine == {"model": "demo", "max_num_seqs": 8}
    assert serving == {"api_key": ["a-key-of-eight"]}
    assert (scaling.max_replicas, scaling.router, scaling.num_replicas) == (4, "prefix", None)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_num_seq": 8}, "max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"port": 8000}, "port"),
        ({"ssl_certfile": "a", "ssl_keyfile": "b"}, "ssl_certfile"),
        ({"max_connections": 5}, "max_connections"),
        ({"nnodes": 2}, "nnodes"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"serve_while_warming": True}, "serve_while_warming"),
        ({"router": "random"}, "router"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"num_replicas": 2, "max_replicas": 3}, "max_replicas"),
        ({"target_queue_s": 0}, "target_queue_s"),
        ({"downscale_delay_s": -1.0}, "downscale_delay_s"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        read_arguments({"model": "demo", **given})


def choose(queue_seconds: list[float], row_shares: list[float], target: float = 2.0) -> int:
    metrics = {"queue_seconds": dict(enumerate(queue_seconds)), "row_share": dict(enumerate(row_shares))}
    return QueueTimePolicy(target)(SimpleNamespace(aggregated_metrics=metrics))[0]


@pytest.mark.parametrize(
    ("queues", "shares", "wanted"),
    [
        ([0.0], [0.0], 1),
        ([1.9], [0.5], 1),
        ([5.0], [1.0], 3),  # five seconds of one replica's work
        ([3.0, 3.0], [1.0, 1.0], 3),
        ([0.0, 0.0, 0.0], [0.1, 0.1, 0.1], 1),
        ([0.0, 0.0, 0.0], [0.5, 0.5, 0.5], 2),  # rows in use keep two
        ([MOST_SECONDS], [1.0], 1800),
    ],
)
def test_the_wait_of_all_and_the_rows_in_use_choose(queues: list[float], shares: list[float], wanted: int) -> None:
    assert choose(queues, shares) == wanted


def test_without_statistics_one_is_wanted() -> None:
    assert QueueTimePolicy(1.0)(SimpleNamespace(aggregated_metrics=None))[0] == 1
