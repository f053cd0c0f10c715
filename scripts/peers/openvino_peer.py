"""OpenVINO GenAI's continuous batching, on a model that optimum-intel exported.

Options: model (the exported model's directory), device, kv_cache_precision, cache_size (GB), and any setting of its
scheduler. Keys and values have the model's dtype unless kv_cache_precision says otherwise; OpenVINO's default is u8.
"""

from __future__ import annotations

import protocol

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def load(job):
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    options = dict(job["options"])
    model, device = options.pop("model", job["model"]), options.pop("device", "CPU")
    precision = _PRECISIONS[job["dtype"]]
    kv_precision = options.pop("kv_cache_precision", precision)
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = job["rows"]
    scheduler.cache_size = options.pop("cache_size", 2)
    scheduler.enable_prefix_caching = False
    for name, value in options.items():
        setattr(scheduler, name, value)
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": kv_precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "INFERENCE_NUM_THREADS": job["threads"],
    }
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, device, properties)
    eos_ids = protocol.read_eos_ids(job)

    def make_config(request):
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = request["max_tokens"], False, job["ignore_eos"]
        config.stop_token_ids = set(eos_ids)
        return config

    def run(requests):
        prompts = [ov.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64)) for request in requests]
        results = pipeline.generate(prompts, [make_config(request) for request in requests])
        outputs = [list(map(int, result.m_generation_ids[0])) for result in results]
        return [protocol.trim(output, request, eos_ids) for output, request in zip(outputs, requests, strict=True)]

    note = "" if kv_precision == precision else f", keys and values {kv_precision}"
    library = f"openvino-genai {genai.__version__.partition('-')[0]}"
    return run, {"library": library, "dtype": job["dtype"] + note, "threads": job["threads"]}


if __name__ == "__main__":
    protocol.main(load)
