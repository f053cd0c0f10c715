"""Facts of the GPU that a kernel is traced for."""

from __future__ import annotations

from pallas_kernels.platform import traced_device_kind

_KIB = 1024
_LARGE_SMS = ("A100", "A800", "A30")  # compute capability 8.0
_LARGE_BLACKWELL = ("B100", "B200", "B300")  # 10.0 and 10.3
BLACKWELL = (*_LARGE_BLACKWELL, "GeForce RTX 50", "Blackwell")  # the others are of 12.0
# Shared memory per SM of 10.0 and 10.3; of 8.0; of 8.6, 8.9 and 12.0. A block can have all but 1 KiB of it.
_BLACKWELL_BYTES, _LARGE_SM_BYTES, _SM_BYTES = 228 * _KIB, 164 * _KIB, 100 * _KIB


def find_sm_bytes() -> int:
    """Shared memory of an SM; the smallest size if the device is not a GPU."""
    if _is_any(_LARGE_BLACKWELL):
        return _BLACKWELL_BYTES
    return _LARGE_SM_BYTES if _is_any(_LARGE_SMS) else _SM_BYTES


def copies_by_tma() -> bool:
    """Whether tiles are copied by TMA: Pallas has cp.async only for GPUs that are older than Hopper."""
    return _is_any(BLACKWELL)


def _is_any(kinds: tuple[str, ...]) -> bool:
    return any(kind in traced_device_kind() for kind in kinds)
