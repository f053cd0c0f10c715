"""Features beside the core, which imports none of them.

Speculation and the host tier are step features, chosen in `choose.py`. Grammars, quantization, bundles, recordings and
several nodes are chosen by the engine.
"""
