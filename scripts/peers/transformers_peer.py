"""Hugging Face transformers: static batches, or its own continuous batching (option continuous)."""

from __future__ import annotations

import protocol


def load(job):
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    transformers.logging.set_verbosity_error()
    options = dict(job["options"])
    is_continuous = options.pop("continuous", False)
    attention = options.pop("attention", "sdpa")
    if options:
        raise ValueError(f"there are no options {sorted(options)}; there are continuous, attention")
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"]), attn_implementation=attention
    ).eval()
    eos_ids = protocol.read_eos_ids(job)
    model.generation_config.eos_token_id = eos_ids or None  # the model's own would count where the job has none
    run = (run_continuous if is_continuous else run_static)(model, job, eos_ids)
    library = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return run, {"library": library, "dtype": job["dtype"], "threads": torch.get_num_threads()}


def run_static(model, job, eos_ids):
    """Batches in order of arrival, padded on the left to the longest prompt; all rows run to the longest answer."""
    import torch
    from transformers import GenerationConfig

    def run(requests):
        outputs = []
        for first in range(0, len(requests), job["rows"]):
            batch = requests[first : first + job["rows"]]
            prompts = [request["prompt_token_ids"] for request in batch]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            config = GenerationConfig(
                max_new_tokens=max(request["max_tokens"] for request in batch),
                do_sample=False,
                pad_token_id=0,
                eos_token_id=eos_ids or None,
            )
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=mask, generation_config=config)
            rows = found[:, width:].tolist()
            outputs += [protocol.trim(row, request, eos_ids) for row, request in zip(rows, batch, strict=True)]
        return outputs

    return run


def run_continuous(model, job, eos_ids):
    """The manager of transformers' continuous batching, kept alive between runs."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=eos_ids or None)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=job["rows"], allow_block_sharing=False,
    )  # fmt: skip
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()

    def run(requests):
        ids = [
            manager.add_request(
                request["prompt_token_ids"], max_new_tokens=request["max_tokens"], eos_token_id=eos_ids or -1
            )
            for request in requests
        ]
        found = {}
        while len(found) < len(ids):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the generation thread of transformers ended")
            elif result.error is not None:
                raise RuntimeError(str(result.error))
            elif result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
        return [protocol.trim(found[each], request, eos_ids) for each, request in zip(ids, requests, strict=True)]

    return run


if __name__ == "__main__":
    protocol.main(load)
