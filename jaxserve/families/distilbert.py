"""DistilBERT: BERT with fewer layers, without types of tokens."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, Table
from jaxserve.core.models.common import omit
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, norm_params, plain_mlp_params
from jaxserve.families import bert

_NAMES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}

KEYS = omit(bert.KEYS, *_NAMES) | {name: bert.KEYS[key] for key, name in _NAMES.items()} | {"type_vocab_size": 0}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a DistilBERT config.json. Positions are a table in the file, whether they are sinusoidal or not."""
    return bert.read_encoder(config.rename(_NAMES), "distilbert", first_position=0)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm after each block."""
    table = norm_params(layer, {"attn_norm": "sa_layer_norm", "mlp_norm": "output_layer_norm"})
    modules = {"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin"}
    table |= attention_params(layer, modules={part: f"attention.{name}" for part, name in modules.items()})
    return table | plain_mlp_params(layer, up="ffn.lin1", down="ffn.lin2")


FAMILY = Family(
    "distilbert",
    "DistilBertModel",
    KEYS,
    parse,
    bert.FAMILY.layer,
    list_layer_params,
    ignored_keys=(
        "dropout",
        "output_past",
        "qa_dropout",
        "seq_classif_dropout",
        "sinusoidal_pos_embds",
        "tie_weights_",
    ),
    trunk=bert.name_trunk("distilbert", "transformer.layer"),
    ignored_weights=(r"vocab_(transform|layer_norm|projector)\..*",),
    headless=("DistilBertForMaskedLM",),
)
