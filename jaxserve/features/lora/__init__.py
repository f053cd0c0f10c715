"""LoRA adapters of the model, each request with its own or none, in the same steps (docs/lora.md)."""
