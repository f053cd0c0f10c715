"""A server's own counters from /metrics, before and after a run: preemptions, prefix hits and the like."""

from __future__ import annotations

from jaxserve.tools.bench.load.target import Target

NAMES = {  # of counters, without the prefix vllm: or jaxserve:
    "preemptions": "num_preemptions_total",
    "prefix_cache_queries": "prefix_cache_queries_total",
    "prefix_cache_hits": "prefix_cache_hits_total",
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
}
_PREFIXES = ("vllm:", "jaxserve:", "jaxserve_")


def read_counters(target: Target, *, timeout: float = 10.0) -> dict[str, float]:
    """Returns the counters that the server has, summed over their labels; none where it has no /metrics."""
    import httpx

    scheme = "https" if target.is_tls else "http"
    try:
        url = httpx.URL(scheme=scheme, host=target.host, port=target.port, path="/metrics")
        answer = httpx.get(url, timeout=timeout, headers=dict(target.headers))
    except httpx.HTTPError:
        return {}
    return parse_counters(answer.text) if answer.status_code == 200 else {}


def parse_counters(text: str) -> dict[str, float]:
    """Returns the known counters of Prometheus' text format. A name that comes with several prefixes counts once."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[tuple[str, str], float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                prefix = next((each for each in _PREFIXES if sample.name.startswith(each)), "")
                key = (sample.name.removeprefix(prefix), prefix)
                sums[key] = sums.get(key, 0.0) + sample.value
    except ValueError:
        return {}
    found = {}
    for key, name in NAMES.items():
        values = [sums[name, prefix] for prefix in _PREFIXES if (name, prefix) in sums]
        if values:
            found[key] = values[0]
    return found


def subtract(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """Returns what was counted between the two."""
    return {key: after[key] - before.get(key, 0.0) for key in after}
