"""Finds a checkpoint's tokenizer and loads it with the library it was made for."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import TokenizerError
from jaxserve.gguf_file import is_gguf
from jaxserve.tokenizers.transformers_names import TransformersTokenizer

_WHAT_WORKS = "a tokenizer.json, one sentencepiece .model file (tokenizer.model), or a GGUF file"
_TIKTOKEN = "tiktoken.model"


def load_tokenizer(path: str | Path, *, lowercases: bool = False) -> TransformersTokenizer:
    """Returns the tokenizer of a checkpoint.

    Args:
        path: a checkpoint's directory (tokenizer.json is preferred, then tokenizer.model, then a single other .model
            file, which may be Kimi's tiktoken.model), or one of these files. The JSON files beside it are read as well.
            Of a GGUF file its own metadata are.
        lowercases: texts are written in small letters first. Only a tokenizer.json can do that.

    Raises:
        TokenizerError: there is no tokenizer, or a file is truncated or malformed; the message names the file and
            what would work.
    """
    file = _find_tokenizer_file(Path(path))
    if is_gguf(file) and not lowercases:
        return _load_gguf(file)
    if file.suffix == ".json":
        from jaxserve.tokenizers.huggingface import load_huggingface

        return load_huggingface(file, lowercases=lowercases)
    if lowercases:
        raise TokenizerError("do_lower_case needs a tokenizer.json; save the tokenizer as one", field=str(file))
    if file.name == _TIKTOKEN:
        from jaxserve.tokenizers.tiktoken import load_tiktoken

        return load_tiktoken(file)
    from jaxserve.tokenizers.sentencepiece import load_sentencepiece

    return load_sentencepiece(file)


def _load_gguf(file: Path) -> TransformersTokenizer:
    from jaxserve.tokenizers.gguf import make_bpe, make_sentencepiece, read_gguf_metadata, read_vocabulary
    from jaxserve.tokenizers.huggingface import HuggingFaceTokenizer
    from jaxserve.tokenizers.sentencepiece import SentencePieceTokenizer

    vocabulary, metadata = read_vocabulary(file), read_gguf_metadata(file)
    if vocabulary.model == "gpt2":
        return HuggingFaceTokenizer(make_bpe(vocabulary, metadata), metadata, file)
    return SentencePieceTokenizer(make_sentencepiece(vocabulary, metadata), metadata, file)


def _find_tokenizer_file(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        if path.suffix in (".json", ".model") or is_gguf(path):
            return path
        raise TokenizerError(f"{path} is none; give {_WHAT_WORKS}", field="tokenizer", value=str(path))
    if not path.is_dir():
        raise TokenizerError(
            f"{path} does not exist; give a directory with {_WHAT_WORKS}", field="tokenizer", value=str(path)
        )
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).exists():  # even a FIFO, which is refused by name later
            return path / name
    models = sorted(path.glob("*.model"))
    if len(models) == 1:
        return models[0]
    if models:
        names = ", ".join(model.name for model in models)
        raise TokenizerError(
            f"{path} holds several .model files ({names}); give the path of one", field="tokenizer", value=str(path)
        )
    raise TokenizerError(
        f"{path} holds no tokenizer; it needs {_WHAT_WORKS}. (vocab.json and merges.txt alone are not read: load and "
        "save that tokenizer once with transformers, which writes tokenizer.json)",
        field="tokenizer",
        value=str(path),
    )
