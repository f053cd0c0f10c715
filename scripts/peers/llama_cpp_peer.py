"""llama.cpp's server. Options: gguf (the model in its format), server (default: llama-server on the PATH).

The dtype of the weights is the file's.
"""

from __future__ import annotations

import atexit
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import protocol


def load(job):
    options = dict(job["options"])
    server, model = options.pop("server", "llama-server"), options.pop("gguf", None)
    if options:
        raise ValueError(f"there are no options {sorted(options)}; there are gguf, server")
    if shutil.which(server) is None:
        raise ImportError(f"{server} is not on the PATH")
    if model is None:
        raise ValueError("needs the model as a GGUF file: llama_cpp: gguf=FILE")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rows, threads = job["rows"], str(job["threads"])
    command = [server, "-m", model, "--port", str(port), "-np", str(rows), "-c", str(rows * job["max_model_len"])]
    process = subprocess.Popen([*command, "-t", threads, "-tb", threads])
    atexit.register(process.kill)

    def ask(path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    while True:
        if process.poll() is not None:
            raise RuntimeError(f"{server} ended with status {process.returncode}")
        try:
            ask("/health")
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)

    def complete(request):
        body = {"prompt": request["prompt_token_ids"], "n_predict": request["max_tokens"], "temperature": 0}
        body |= {"ignore_eos": job["ignore_eos"], "cache_prompt": False, "return_tokens": True}
        answer = ask("/completion", body)
        return answer.get("tokens") or answer["tokens_predicted"]

    pool = ThreadPoolExecutor(rows)

    def run(requests):
        return list(pool.map(complete, requests))

    return run, {"library": "llama.cpp's server", "dtype": "the file's", "threads": job["threads"]}


if __name__ == "__main__":
    protocol.main(load)
