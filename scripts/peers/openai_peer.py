"""Any OpenAI server by URL. Options: base_url, server_model (default: its first). The key is OPENAI_API_KEY.

It must serve the same model. Its token ids are compared where it returns them (`return_token_ids`).
"""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import protocol


def load(job):
    options = dict(job["options"])
    base_url = options.pop("base_url", "http://127.0.0.1:8000").rstrip("/")
    name, key = options.pop("server_model", None), options.pop("api_key", "")
    if options:
        raise ValueError(f"there are no options {sorted(options)}; there are base_url, server_model")
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base_url + path, data, headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    name = name or ask("/v1/models")["data"][0]["id"]

    def complete(request):
        body = {"model": name, "prompt": request["prompt_token_ids"], "max_tokens": request["max_tokens"]}
        body |= {"temperature": 0, "return_token_ids": True, **({"ignore_eos": True} if job["ignore_eos"] else {})}
        answer = ask("/v1/completions", body)
        return answer["choices"][0].get("token_ids") or answer["usage"]["completion_tokens"]

    pool = ThreadPoolExecutor(job["rows"])

    def run(requests):
        return list(pool.map(complete, requests))

    return run, {"library": f"{name} at {base_url}", "dtype": "the server's", "threads": "the server's"}


if __name__ == "__main__":
    protocol.main(load)
