"""Run by test_tensor_parallel.py in a process with four virtual CPU devices; prints the names of passed cases."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.layers.stack import get_leaf
from jaxserve.models.decoder import expand_kv_heads
from jaxserve.models.registry import parse_config
from jaxserve.sharding import make_mesh
from tests.models.naive import NaiveRunner, build_params, make_tensors, shard_params

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
LLAMA = SIZES | {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64}
CASES = {
    "llama": (LLAMA | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, "unrolled"),
    "one_kv_head_odd_vocabulary": (
        LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "vocab_size": 131},
        "stacked",
    ),
    "olmo2": (LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2}, "stacked"),
    "cohere": (
        LLAMA | {"model_type": "cohere", "num_key_value_heads": 2, "use_qk_norm": True},
        "stacked",
    ),
    "gemma2": (
        SIZES
        | {"model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 8}
        | {"max_position_embeddings": 64, "query_pre_attn_scalar": 16},
        "stacked",
    ),
}


def check_case(hf_config: dict[str, object], mode: str) -> None:
    """Greedy decoding of three ragged rows, on one device and on four."""
    config = parse_config(hf_config)
    wide = expand_kv_heads(config, 4)
    tensors = make_tensors(config, seed=3)
    mesh = make_mesh(4)
    params = shard_params(wide, build_params(wide, tensors), mesh, mode)
    for name, axis in (("qkv", -1), ("o", -2), ("gate_up", -1), ("down", -2)):
        leaf, _ = get_leaf(params, f"layers.0.{name}.weight")
        assert leaf.addressable_shards[0].data.shape[axis] * 4 == leaf.shape[axis], name
    single = NaiveRunner(config, build_params(config, tensors), 3)
    meshed = NaiveRunner(wide, params, 3, mesh=mesh)
    rng = np.random.default_rng(4)
    rows = [rng.integers(0, config.vocab_size, size).tolist() for size in (1, 13, 22)]
    for _ in range(3):
        expected, got = single.run(rows, pad_to=40), meshed.run(rows, pad_to=40)  # one program for all steps
        for one, four in zip(expected, got, strict=True):
            np.testing.assert_allclose(four, one, rtol=0, atol=1e-4 * np.abs(one).max())
        rows = [[int(logits[-1].argmax())] for logits in expected]
        assert rows == [[int(logits[-1].argmax())] for logits in got]
    pool = meshed.cache[0]
    assert pool.addressable_shards[0].data.shape[1] * 4 == pool.shape[1]


def main() -> None:
    assert jax.device_count() == 4
    for name, case in CASES.items():
        check_case(*case)
        print(name, flush=True)


if __name__ == "__main__":
    main()
