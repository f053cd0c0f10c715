"""No engine, but the pace of this machine's CPU: large matrix products of XLA's, in the comparison's dtype.

Each run takes as many operations as the fact `operations` says, whatever the requests are.
"""

from __future__ import annotations

import protocol

_SIZE, _CALLS = 2048, 4


def load(job):
    import jax

    jax.config.update("jax_platforms", "cpu")
    keys = jax.random.split(jax.random.key(0))
    left, right = (jax.random.normal(key, (_SIZE, _SIZE), job["dtype"]) for key in keys)
    multiply = jax.jit(jax.numpy.matmul)

    def run(requests):
        for _ in range(_CALLS):
            multiply(left, right).block_until_ready()
        return [0] * len(requests)

    return run, {"operations": 2 * _SIZE**3 * _CALLS}


if __name__ == "__main__":
    protocol.main(load)
