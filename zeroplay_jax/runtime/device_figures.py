"""Peak rate and memory of the devices of a run."""

from __future__ import annotations

import jax

# `Device.device_kind` → operations per second in bfloat16 without sparsity, by the vendors' data sheets. A device is
# what JAX counts as one. The longest beginning that fits is taken: vendors add memory sizes and board forms.
_PEAKS = {
    'TPU v4': 275e12,
    'TPU v5 lite': 197e12,
    'TPU v5e': 197e12,
    'TPU v5': 459e12,
    'TPU v5p': 459e12,
    'TPU v6 lite': 918e12,
    'TPU v6e': 918e12,
    'NVIDIA A100': 312e12,
    'NVIDIA H100 80GB': 989e12,
    'NVIDIA H200': 989e12,
    'NVIDIA L4': 121e12,
    'NVIDIA L40S': 362e12,
}
_GIB = 1 << 30


def peak_operations() -> float | None:
    """Returns the operations per second of all devices of the run at their peak; None if a device's is unknown."""
    total = 0.0
    for device in jax.devices():
        peak = _peak_of(device.device_kind)
        if peak is None:
            return None
        total += peak
    return total


def _peak_of(kind: str) -> float | None:
    """Returns the peak of a device by its name."""
    fitting = [name for name in _PEAKS if kind == name or kind.startswith((f'{name} ', f'{name}-'))]
    if not fitting:
        return None
    return _PEAKS[max(fitting, key=len)]


def memory() -> dict[str, float]:
    """Returns 'memory/used_gib' and 'memory/peak_gib' of the fullest device of this process.

    'peak' is that since the process started. {} on devices that do not report it, such as CPUs.
    """
    used = []
    peaks = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if 'bytes_in_use' in stats:
            used.append(stats['bytes_in_use'])
            peaks.append(stats.get('peak_bytes_in_use', stats['bytes_in_use']))
    if not used:
        return {}
    return {'memory/used_gib': max(used) / _GIB, 'memory/peak_gib': max(peaks) / _GIB}
