"""The demo model's workshop: what it is taught, how it is trained, and how its skills are measured.

`glossary`, `questions`, `tasks`, `toolbox`, `calling` and `corpus` make examples; `tokens` and `packing` turn them into
arrays; `model`, `optimizer` and `training` learn from them; `export` writes a Hugging Face checkpoint; `scoring` and
`exam` ask questions that training never showed, and `answering` answers them without an engine.
"""
