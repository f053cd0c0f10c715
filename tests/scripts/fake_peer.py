"""A participant that computes nothing: `how` says what it does wrong."""

from __future__ import annotations

import os
import time

import protocol


def load(job):
    how = job["options"].get("how", "")
    if how == "missing":
        raise ModuleNotFoundError("No module named 'fast_engine'")
    if how == "load":
        raise ValueError("cannot read\nthe model")
    if how == "exit":
        raise SystemExit(3)
    if "pids" in job["options"]:
        with open(job["options"]["pids"], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
    turns = []

    def run(requests):
        turns.append(None)
        if how == "hang" and len(turns) > 1:
            time.sleep(60)
        if how == "fail" and len(turns) > 2:  # the first run is the warm-up
            raise RuntimeError("out of memory")
        time.sleep(job["options"].get("seconds", 0.01))
        if how == "counts":
            return [request["max_tokens"] for request in requests]
        answers = [[len(request["prompt_token_ids"])] * request["max_tokens"] for request in requests]
        if how == "differs":
            answers[0] = [*answers[0][:-1], 9999]
        if how == "few":
            return answers[:1]
        return {"outputs": answers, "num_compiled": 2} if how == "compiles" else answers

    return run, {"library": "fake 1.0", "dtype": job["dtype"], "threads": job["threads"]}


if __name__ == "__main__":
    protocol.main(load)
