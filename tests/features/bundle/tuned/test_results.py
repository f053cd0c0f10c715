"""Results of XLA's tuning: read from its text, and written down for any version of it."""

from __future__ import annotations

import pytest

from jaxserve.features.bundle.tuned.results import TunedResult, read_results, take_products, write_results

H200 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4800 GB/s, L2 cache: 50 MB, DNN version: 9.12.0"
TILES = "  result {\n    triton {\n      block_m: 64\n      block_n: 128\n    }\n  }"
PRODUCT = (
    r"{\n  tmp_0 = bf16[4096,6144]{1,0} parameter(1)\n"
    r"  ROOT tmp_1 = f32[256,6144]{1,0} dot(bf16[256,4096]{1,0} tmp_2, bf16[4096,6144]{1,0} tmp_0), "
    r"frontend_attributes={a=\"b\"}\n}"
)
ADDITION = r"{\n  ROOT tmp_0 = f32[8]{0} add(f32[8]{0} tmp_1, f32[8]{0} tmp_2)\n}"
# As jax 0.11.2 writes it.
DUMP = f"""version: 3
results {{
  device: "{H200}"
  hlo: "{PRODUCT}"
{TILES}
  version: 52
}}
results {{
  device: "{H200}"
  hlo: "{ADDITION}"
  result {{
    other {{
      name: "NATIVE_EMITTER"
    }}
  }}
  version: 52
}}
"""


def test_entries_lose_their_version_and_nothing_else() -> None:
    results = read_results(DUMP)
    assert results[0] == TunedResult(H200, PRODUCT, TILES) and results[1].hlo == ADDITION
    assert write_results(results) == DUMP.replace("  version: 52\n", "")
    assert read_results(write_results(results)) == results


@pytest.mark.parametrize("text", ["", "version: 4\n", "results {\n}\n", 'version: 3\nresults {\n  device: "x"\n}\n'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="XLA's tuning"):
        read_results(text)


def test_a_product_is_kept_once_and_what_is_none_is_left_out() -> None:
    dumped = read_results(DUMP)
    later = TunedResult(H200, PRODUCT, TILES.replace("64", "32"))
    assert take_products([*dumped, later]) == dumped[:1]
