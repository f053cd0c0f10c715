"""Small real tokenizers, trained here: each in a directory as a checkpoint holds it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "hello world, the cat sat on the mat",
    "The dog ran over the hill in 1234 days",
    "café naïve 日本語 テキスト 😀 e\u0301",
    "a  b   c\nnew line\ttab",
] * 8
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def make_byte_level(directory: Path, *, vocab_size: int = 330) -> Tokenizer:
    """A byte-level BPE as Qwen and GPT-2 have it, with chat tokens; writes tokenizer.json."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator(LINES, trainer)
    library.add_special_tokens(["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("né e", normalized=False)])
    library.save(str(directory / "tokenizer.json"))
    return library


def make_llama3(directory: Path, **config: Any) -> Tokenizer:
    """The same with a post-processor that puts BOS in front, and the JSON files of a chat checkpoint."""
    library = make_byte_level(directory)
    bos = library.token_to_id("<|bos|>")
    template = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", bos)]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    library.enable_truncation(4)  # left over from training: must not cut prompts
    library.enable_padding(length=64)
    library.save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHAT_TEMPLATE}
    write_json(directory / "tokenizer_config.json", {**defaults, **config})
    eos_ids = [library.token_to_id("<|eos|>"), library.token_to_id("<|im_end|>")]
    write_json(directory / "generation_config.json", {"eos_token_id": eos_ids})
    return library


def make_llama2(directory: Path, **config: Any) -> Tokenizer:
    """A BPE over words that begin with a space mark, with byte pieces; the decoder strips the first space."""
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=pieces, show_progress=False)
    library.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    content = json.loads(library.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < 3]
    library = Tokenizer.from_str(json.dumps(content))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(directory / "tokenizer.json"))
    defaults = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    write_json(directory / "tokenizer_config.json", {**defaults, **config})
    return library


def make_metaspace(directory: Path) -> Tokenizer:
    """A BPE over words, each with the space mark in front, as T5 and Mistral have it; the first word loses its mark."""
    library = Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    library.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return library


def make_words(directory: Path, decoder: decoders.Decoder | None) -> Tokenizer:
    """Words and added tokens, special and plain ones; without a decoder the library joins them all by spaces."""
    texts = ["<unk>", "cat", "▁sat", "!", "<a>", "▁<b>", " <c>", "<tool>", "▁▁"]
    library = Tokenizer(models.WordLevel(dict(zip(texts, range(9), strict=True)), unk_token="<unk>"))
    library.add_special_tokens(["<unk>", "<a>", "▁<b>", " <c>"])
    library.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("▁▁", normalized=False)])
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        library.decoder = decoder
    library.save(str(directory / "tokenizer.json"))
    return library


def make_sentencepiece(directory: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A sentencepiece BPE with byte pieces and single digits; keeps blanks as they are unless options say otherwise."""
    defaults: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400,
        "byte_fallback": True,
        "split_digits": True,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in LINES if line.isascii()]),
        model_writer=model,
        **{**defaults, **options},
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
