"""Which kernel a model's recurrent states get, and what happens when it is wrong."""

from __future__ import annotations

import jax
import pytest

from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime.recurrence import RecurrenceChoice, choose_recurrence, confirm_recurrence
from jaxserve.families.registry import parse_config
from jaxserve.presets import load_preset
from pallas_kernels.recurrent.spec import RuleShape


def read(name: str, size: int = 1) -> DecoderConfig:
    return fit_devices(parse_config(dict(load_preset(name) or {})), size)


def list_impls(model: DecoderConfig) -> set[str]:
    return {kind.mixer.impl for kind in model.layers if isinstance(kind.mixer, GatedDeltaConfig | Mamba2Config)}


def test_a_model_without_states_has_none() -> None:
    model = read("qwen3-8b")
    assert choose_recurrence(model, 1, "tpu", "TPU v5 lite", 2048, 128) == (model, None)


def test_a_kernel_is_chosen_for_each_device_s_share_of_the_heads() -> None:
    model, choice = choose_recurrence(read("qwen3.6-35b-a3b", 8), 8, "tpu", "TPU v5 lite", 2048, 128)
    assert choice is not None and (choice.impl, choice.is_slow) == ("tpu", False)
    assert choice.shapes == (RuleShape(2, 2, 128, 128, "float32", 2048),)
    assert list_impls(model) == {"tpu"}


def test_a_state_space_has_a_kernel_on_a_gpu() -> None:
    model, choice = choose_recurrence(read("nemotron-3-nano-30b-a3b", 2), 2, "gpu", "NVIDIA H200", 2048, 256)
    assert choice is not None and choice.shapes == (RuleShape(4, 8, 128, 64, "float32", 2048, "space"),)
    assert (choice.impl, choice.is_slow, list_impls(model)) == ("gpu", False, {"gpu"})
    _, choice = choose_recurrence(read("nemotron-nano-9b-v2"), 1, "gpu", "NVIDIA H200", 2048, 256)
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", True) and "of 128 and 80" in choice.reason
    _, choice = choose_recurrence(read("nemotron-nano-9b-v2"), 1, "tpu", "TPU v6 lite", 2048, 256)
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", False)


def test_a_plan_counts_what_a_kernel_reads_in_float32() -> None:
    for name in ("qwen3.6-35b-a3b", "nemotron-3-nano-30b-a3b"):
        model = read(name)
        with_kernel, _ = choose_recurrence(model, 1, "gpu", "NVIDIA H200", 2048, 256)
        before, after = (max(kind.mixer.num_activations for kind in each.layers) for each in (model, with_kernel))
        assert after > 1.5 * before


def test_what_a_kernel_cannot_do_is_slow_and_said() -> None:
    model, choice = choose_recurrence(read("qwen3.6-35b-a3b"), 1, "tpu", "TPU v5 lite", 65536, 128)
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", True)
    assert "max_num_batched_tokens" in choice.reason and list_impls(model) == {"xla"}


def test_on_a_cpu_nothing_is_called_slow() -> None:
    _, choice = choose_recurrence(read("qwen3.6-35b-a3b"), 1, "cpu", "cpu", 2048, 128)
    assert choice is not None and (choice.impl, choice.is_slow) == ("xla", False)


@pytest.mark.parametrize("fault", [None, "states or answers differ by 0.3"])
def test_a_kernel_that_fails_its_self_test_gives_way(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.core.runtime.recurrence.find_fault", lambda *_: fault)
    before, choice = choose_recurrence(read("qwen3.6-35b-a3b"), 1, "tpu", "TPU v5 lite", 2048, 128)
    assert choice is not None
    model, confirmed = confirm_recurrence(before, choice, jax.devices()[0])
    if fault is None:
        assert (model, confirmed) == (before, choice)
    else:
        assert (confirmed.impl, confirmed.is_slow) == ("xla", True) and fault in confirmed.reason
        assert list_impls(model) == {"xla"} and confirmed.shapes == choice.shapes


def test_what_a_kernel_refuses_after_all_is_said() -> None:
    model, tiny = read("qwen3.6-35b-a3b"), RuleShape(1, 1, 64, 128, "float32", 4)
    _, confirmed = confirm_recurrence(model, RecurrenceChoice("tpu_interpret", "a test", (tiny,), 2), jax.devices()[0])
    assert confirmed.impl == "xla" and "these are of 64 x 128" in confirmed.reason
