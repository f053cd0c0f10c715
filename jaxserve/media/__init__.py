"""Images on the host: where they come from, how they are decoded, and what a family's tower gets of them.

```
content part -> parts.py        what the body says: an address or data, and the detail
loader.py    -> sources.py      its file: data, or a host (fetch.py, addresses.py) or a folder that the operator allowed
             -> reader.py       a process that can be killed: decode.py, then the size that processors/ choose
             -> items.py        MediaItem: pixels, grid, number of placeholder tokens, digest
prompt       -> prompt.py       one placeholder an image becomes as many as its item counts   -> MediaSpan
             -> positions.py    Qwen's positions of tokens, in three parts; patch_positions.py has those of patches
```

Numpy and Pillow, which is an extra; no jax. Nothing imports Pillow before an image is read.
"""
