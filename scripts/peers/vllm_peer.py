"""vLLM, for accelerators or in its build for CPUs; job["options"] are arguments of its `LLM`."""

from __future__ import annotations

import protocol


def load(job):
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    options = {
        "dtype": job["dtype"],
        "max_num_seqs": job["rows"],
        "max_model_len": job["max_model_len"],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **job["options"],
    }
    if current_platform.is_cpu():  # what else is needed than VLLM_CPU_KVCACHE_SPACE; participants share the memory
        options.setdefault("gpu_memory_utilization", 0.4)
    llm = LLM(job["model"], **options)
    eos_ids = protocol.read_eos_ids(job)

    def run(requests):
        prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=job["ignore_eos"],
                stop_token_ids=eos_ids, detokenize=False,
            )
            for request in requests
        ]  # fmt: skip
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return run, {"library": f"vllm {vllm.__version__}", "dtype": options["dtype"]}


if __name__ == "__main__":
    protocol.main(load)
