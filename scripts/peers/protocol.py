"""The peers' side of a comparison: JSON lines over stdin and stdout, with the standard library only.

The first line is the job: model (a directory), dtype, rows (how many requests may run at once), threads, max_model_len,
ignore_eos, options, and requests, each with prompt_token_ids and max_tokens. It is answered by {"ready": true, ...},
with what the peer says of itself, once everything is loaded and all requests have been run once. Every further line
asks for a run, which is answered by its seconds and outputs. Faults are answered by {"error": "..."}. The process ends
with its stdin. Who starts it sets the variables of its environment.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback


def main(load):
    """Runs a peer. `load(job)` returns a function that runs requests, and facts about the peer.

    That function takes the requests and returns the token ids of each answer, or their number where it has no ids;
    or a dictionary with these as "outputs" and further figures.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print

    def reply(**message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    end_with_parent()
    job = json.loads(sys.stdin.readline())
    try:
        limit_threads(job["threads"])
        run, facts = load(job)
        run(job["requests"])
    except ImportError as error:
        reply(error=f"not installed: {error}")
        return
    except Exception as error:
        traceback.print_exc()
        reply(error=f"{type(error).__name__}: {error}")
        return
    reply(ready=True, **facts)
    for _ in sys.stdin:
        try:
            start, cpu = time.perf_counter(), time.process_time()
            found = run(job["requests"])
            seconds = time.perf_counter() - start
        except Exception as error:
            traceback.print_exc()
            reply(error=f"{type(error).__name__}: {error}")
            return
        more = found if isinstance(found, dict) else {"outputs": found}
        reply(seconds=seconds, cpu_seconds=time.process_time() - cpu, **more)
    os._exit(0)  # libraries leave threads that never end


def end_with_parent():
    """Has Linux end this process when its parent is gone: one that is stopped does not see the end of its stdin."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def limit_threads(count):
    """Lets this process use `count` cores; called before a library asks how many there are."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def trim(ids, request, eos_ids):
    """Returns the ids of an answer up to its length and its first end-of-sequence id, that one included."""
    ids = ids[: request["max_tokens"]]
    ends = [at for at, token in enumerate(ids) if token in eos_ids]
    return ids[: ends[0] + 1] if ends else ids


def read_eos_ids(job):
    """Returns the ids that end an answer of this job, as the model's directory says; none where they are ignored."""
    if job["ignore_eos"]:
        return []
    found = None
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(job["model"], name)
        if found is None and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                found = json.load(file).get("eos_token_id")
    return [] if found is None else found if isinstance(found, list) else [found]
