"""The options of LoRA adapters, by vLLM's names, and a request's choice of one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxserve.errors import ConfigError, InvalidRequestError, shorten
from jaxserve.options import check_at_least, option

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
LORA_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Adapters of the model, each request with its own or none (docs/lora.md)."""

    enable_lora: bool = option(False, "serve LoRA adapters of the model, each request with its own or none")
    max_loras: int = option(1, "adapters in one step, each of which has a slot on the device")
    max_lora_rank: int = option(16, "largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512")
    max_cpu_loras: int | None = option(
        None, "adapters kept on the host beside those that unfinished requests name; default: max_loras"
    )
    lora_dtype: str = option("auto", "dtype of adapters; auto: the model's", choices=LORA_DTYPES)
    lora_target_modules: tuple[str, ...] = option(
        (), "the only modules that adapters may change, as q_proj o_proj; default: all that can be", takes_many=True
    )

    def __post_init__(self) -> None:
        check_at_least(self, max_loras=1, max_cpu_loras=1)
        for name, known in (("max_lora_rank", LORA_RANKS), ("lora_dtype", LORA_DTYPES)):
            value = getattr(self, name)
            if value not in known:
                message = f"must be one of {', '.join(map(str, known))}, got {shorten(value)}"
                raise ConfigError(message, field=name, value=value)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            message = f"must be at least max_loras={self.max_loras}, got {self.max_cpu_loras}"
            raise ConfigError(message, field="max_cpu_loras", value=self.max_cpu_loras)
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if given and not self.enable_lora:
            message = "needs enable_lora, without which there are no adapters"
            raise ConfigError(message, field=given[0], value=getattr(self, given[0]))

    @property
    def num_slots(self) -> int:
        """Slots on the device; 0 without adapters."""
        return self.max_loras if self.enable_lora else 0

    @property
    def num_copies(self) -> int:
        """Adapters kept on the host whether or not a request needs them."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A request's adapter (vLLM's name): its name and number, and the directory with its files in PEFT's format, or
    `demo:subtraction` or `demo:pirate`, the demo model's own.

    One name has one number and one path.

    Raises:
        InvalidRequestError: a field is empty or has another type.
    """

    lora_name: str
    lora_int_id: int  # at least 1
    lora_path: str

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                message = f"must be a text that is not empty, got {shorten(value)}"
                raise InvalidRequestError(message, field=name, value=value)
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            message = f"must be an integer of at least 1, got {shorten(number)}"
            raise InvalidRequestError(message, field="lora_int_id", value=number)
