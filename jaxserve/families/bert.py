"""BERT, and the embedding models made of it: MiniLM, BGE, E5, GTE, Arctic Embed."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.layers.embedding import AddedEmbeddings
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import post_norm_layer
from jaxserve.core.models.common import build_config, make_encoder, read_attention, read_mlp, read_norm, read_num_layers
from jaxserve.core.models.hf_config import REQUIRED, HFConfig
from jaxserve.core.models.parameters import attention_params, norm_params, plain_mlp_params
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError
from jaxserve.pooling_options import PoolingType

KEYS: dict[str, object] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "position_embedding_type": None,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "dtype": None,
    "torch_dtype": None,
}

# Of training, of heads, and of the pooler, which no embedding is made with.
IGNORED_KEYS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "output_past",
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a BERT config.json."""
    return read_encoder(config, "bert", first_position=0)


def read_encoder(config: HFConfig, family: str, *, first_position: int) -> DecoderConfig:
    """Returns the model of a config.json with BERT's keys, whose texts begin at row `first_position` of positions."""
    config.require(position_embedding_type="absolute")
    config.require_off("is_decoder", "add_cross_attention")
    mlp = read_mlp(config, bias=True, gated=False)
    kind = LayerKind(read_attention(config, qkv_bias=True, out_bias=True), None, None, mlp)
    rows = config.integer("max_position_embeddings")
    model = build_encoder(config, family, kind, AddedEmbeddings(rows, first_position))
    longest = rows - first_position
    if longest < 1:
        message = f"must be above {first_position}, the row of a text's first position, not {rows}"
        raise ConfigError(message, field="max_position_embeddings", value=rows)
    return replace(model, max_position_embeddings=longest, max_model_len=longest)


def build_encoder(
    config: HFConfig, family: str, kind: LayerKind, added: AddedEmbeddings, pooling_type: PoolingType = "CLS"
) -> DecoderConfig:
    """Returns the model of equal layers with BERT's norms and types of tokens."""
    norm = read_norm(config, "layer_norm_eps", centered=True, bias=True, wide=True)
    model = build_config(config, family, layers=(kind,) * read_num_layers(config), norm=norm)
    added = replace(added, num_types=config.integer("type_vocab_size", minimum=0))
    return make_encoder(model, added=added, final_norm=False, pooling_type=pooling_type)


_ATTENTION = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
}


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm after each block."""
    table = norm_params(layer, {"attn_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"})
    table |= attention_params(layer, modules=_ATTENTION)
    return table | plain_mlp_params(layer, up="intermediate.dense", down="output.dense")


def name_trunk(module: str, layers: str = "encoder.layer") -> Trunk:
    """Returns the names of the modules around the layers, below the one around all."""
    return Trunk(f"{module}.embeddings.word_embeddings", f"{module}.{layers}")


def list_ignored(module: str) -> tuple[str, ...]:
    """Returns patterns of tensors that no embedding is made with: the pooler, a head, and numbers of positions."""
    around = rf"({module}\.)?"
    return rf"{around}pooler\..*", r"(cls|lm_head)\..*", rf"{around}embeddings\.(position|token_type)_ids"


FAMILY = Family(
    "bert",
    "BertModel",
    KEYS,
    parse,
    post_norm_layer,
    list_layer_params,
    ignored_keys=IGNORED_KEYS,
    trunk=name_trunk("bert"),
    ignored_weights=list_ignored("bert"),
    headless=("BertForMaskedLM",),
)
