"""Results of XLA's tuning: read from its text, kept once for all layers, and written down for each."""

from __future__ import annotations

import pytest

from jaxserve.runtime.tuned.results import TunedResult, read_results, repeat_layers, take_products, write_results

H200 = "CUDA: 9.0, Cores: 132, GPU clock: 1.98 GHz, Memory bandwidth: 4800 GB/s, L2 cache: 50 MB, DNN version: 9.12.0"
TILES = "  result {\n    triton {\n      block_m: 64\n      block_n: 128\n    }\n  }"
PRODUCT = (
    r"{\n  tmp_0 = bf16[4,4096,6144]{2,1,0} parameter(1)\n"
    r"  tmp_1 = bf16[1,4096,6144]{2,1,0} slice(bf16[4,4096,6144]{2,1,0} tmp_0), slice={[2:3], [0:4096], [0:6144]}\n"
    r"  tmp_2 = bf16[4096,6144]{1,0} bitcast(bf16[1,4096,6144]{2,1,0} tmp_1)\n"
    r"  ROOT tmp_3 = f32[256,6144]{1,0} dot(bf16[256,4096]{1,0} tmp_4, bf16[4096,6144]{1,0} tmp_2), "
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


def place(count: int, index: int) -> str:
    """The product in layer `index` of `count`."""
    text = PRODUCT.replace("bf16[4,4096", f"bf16[{count},4096")
    return text.replace("slice={[2:3]", f"slice={{[{index}:{index + 1}]")


def test_entries_lose_their_version_and_nothing_else() -> None:
    results = read_results(DUMP)
    assert results[0] == TunedResult(H200, PRODUCT, TILES) and results[1].hlo == ADDITION
    assert write_results(results) == DUMP.replace("  version: 52\n", "")
    assert read_results(write_results(results)) == results


@pytest.mark.parametrize("text", ["", "version: 4\n", "results {\n}\n", 'version: 3\nresults {\n  device: "x"\n}\n'])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="XLA's tuning"):
        read_results(text)


def test_a_product_of_each_layer_is_kept_once_and_what_is_none_is_left_out() -> None:
    layers = [TunedResult(H200, place(count, index), TILES) for count in (2, 4) for index in range(count)]
    assert take_products([*read_results(DUMP), *layers]) == read_results(DUMP)[:1]


def test_a_product_is_written_down_for_each_layer_of_each_depth() -> None:
    (product,) = take_products(read_results(DUMP))
    found = [each.hlo for each in repeat_layers([product], [1, 3, 3, 32])]
    assert found[0] == PRODUCT and len(found) == len(set(found)) == 1 + 3 + 32
    assert {place(3, 2), place(32, 0), place(32, 31)} <= set(found)
    assert {each.choice for each in repeat_layers([product], [3])} == {TILES}


def test_a_slice_of_several_rows_is_no_layer() -> None:
    rows = PRODUCT.replace("[2:3]", "[0:2]")
    assert [each.hlo for each in repeat_layers([TunedResult(H200, rows, TILES)], [32])] == [rows]
