"""The devices of a run: joining processes, ending with them, the cache of compiled programs, peak rates and memory."""

from __future__ import annotations

import collections
import ctypes
import os
import pathlib
import socket
import sys
import threading
import time
from typing import Any

import jax

from zeroplay_jax.types import UserError, first_line

# The hosts of a TPU slice start minutes apart. This is also JAX's own default timeout.
JOIN_SECONDS = 300.0
# Options of glibc's mallopt(3). M_TRIM_THRESHOLD and M_MMAP_MAX: what is freed stays in the heap. Threads keep heaps of
# their own: with one for all, devices wait for its lock.
_MALLOC_OPTIONS = {-1: -1, -4: 0}


def divide_cpu(devices: int) -> None:
    """Makes JAX divide the CPU into `devices` devices; GPUs and TPUs have their own.

    A number in XLA_FLAGS has priority. Where JAX has its devices already, as in a notebook, they stay as they are.
    """
    is_in_flags = 'xla_force_host_platform_device_count' in os.environ.get('XLA_FLAGS', '')
    if devices == 1 or is_in_flags:
        return
    try:
        jax.config.update('jax_num_cpu_devices', devices)
    except RuntimeError:
        # The backend is initialised. A mesh with an axis of -1 takes the devices that there are.
        return
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next allocation; call it before JAX starts its threads.

    XLA allocates the temporaries of a program at every call on a CPU: 290 MB in an update of the quickstart. Otherwise
    they are mapped anew, and the kernel clears page after page, a sixth of the CPU time of the update.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    # Other C libraries have no such options.
    if mallopt is not None:
        for option, value in _MALLOC_OPTIONS.items():
            mallopt(option, value)


def connect(mode: str, coordinator: str, processes: int, process: int, heartbeat: int) -> None:
    """Joins the processes of a run. Call it before JAX initialises its devices.

    If some process is missing after `JOIN_SECONDS`, this process prints one line and exits with code 2; it cannot
    raise, because JAX waits in C++.

    Args:
      mode: 'off' (one process), 'auto' (JAX detects the cluster: TPU VMs, SLURM, GKE and others), or 'coordinator'.
      coordinator: 'host:port' of process 0; used in mode 'coordinator' only, like the next two.
      processes: number of processes.
      process: index of this process.
      heartbeat: seconds without a heartbeat from one process after which JAX stops the other ones.

    Raises:
      UserError: no cluster was detected, process 0 cannot open its port, or process 0 does not answer.
    """
    if mode == 'off':
        return
    explicit: dict[str, Any] = {}
    if mode == 'coordinator':
        explicit['coordinator_address'] = coordinator
        explicit['num_processes'] = processes
        explicit['process_id'] = process
        # Detection is switched off: under SLURM, JAX would restrict every process to one GPU.
        explicit['cluster_detection_method'] = 'deactivate'
        if process == 0:
            _check_port_is_free(coordinator)
        else:
            _wait_until_open(coordinator, JOIN_SECONDS)
    # When a process is missing, JAX aborts in C++ with a long stack trace. This timer fires earlier and prints one
    # line; JAX's own timeout is set a minute later so that it never fires first.
    join_timer = threading.Timer(JOIN_SECONDS, _exit_after_timeout, (mode,))
    join_timer.daemon = True
    join_timer.start()
    jax_timeout = int(JOIN_SECONDS) + 60
    # JAX's own service would take SIGTERM from `preemption`, and only note it.
    jax.config.update('jax_enable_preemption_service', False)
    try:
        jax.distributed.initialize(
            **explicit, heartbeat_timeout_seconds=heartbeat, initialization_timeout=jax_timeout
        )
    except (ValueError, RuntimeError) as error:
        if mode == 'coordinator':
            hint = f'is process 0 up at {coordinator}?'
        else:
            hint = 'set config.distributed.mode to off on one machine, or to coordinator'
        problem = f'config.distributed.mode={mode}: {first_line(error)}'
        raise UserError(f'{problem}; {hint}') from error
    finally:
        join_timer.cancel()


def leave(code: int) -> None:
    """Exits this process at once if the run has other processes; returns otherwise.

    A normal exit would deadlock: JAX's shutdown barrier waits for the other processes, which wait for this one.
    They stop when they miss its heartbeat.

    Args:
      code: exit code.
    """
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        # os._exit skips Python's cleanup, so the buffers are flushed explicitly.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_after_timeout(mode: str) -> None:
    """Ends the process with an error line; called by the timer of `connect`, in a thread of its own."""
    print(
        f'zeroplay_jax: config.distributed.mode={mode}: not all processes came together within {JOIN_SECONDS:.0f} s; '
        'start the same command on every host, and let the hosts reach each other',
        file=sys.stderr,
        flush=True,
    )
    # The main thread waits in C++, where no Python exception reaches it.
    os._exit(2)


def _check_port_is_free(coordinator: str) -> None:
    """Raises UserError if process 0 cannot open its port; JAX's server would end the process silently."""
    port = int(coordinator.rsplit(':', 1)[1])
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(address_family) as probe:
        # JAX's server sets SO_REUSEADDR; without it the probe would reject ports that the server can open.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('', port))
        except OSError as error:
            raise UserError(
                f'config.distributed.coordinator={coordinator}: process 0 cannot open that port '
                f'({error.strerror}); choose another'
            ) from None


def _wait_until_open(coordinator: str, seconds: float) -> None:
    """Waits until process 0 listens; if it never did, JAX's client would abort in C++.

    Args:
      coordinator: 'host:port' of process 0; an IPv6 host is in brackets.
      seconds: how long to wait.

    Raises:
      UserError: process 0 did not answer in time.
    """
    host, _, port = coordinator.rpartition(':')
    address = (host.strip('[]'), int(port))
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(address, timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or error
                raise UserError(
                    f'config.distributed.coordinator={coordinator}: process 0 did not answer for {seconds:.0f} s '
                    f'({reason}); start it, and make its host reachable from this one'
                ) from None
            time.sleep(0.5)


# Events of JAX → names of the counts.
_EVENTS = {
    '/jax/compilation_cache/cache_hits': 'cached',
    '/jax/compilation_cache/cache_misses': 'compiled',
}


class CompilationCache:
    """Counts the programs that were read from the cache and those that were compiled, in this process.

    Args:
      folder: of the cache; several runs may share it. '' leaves JAX's own settings (JAX_COMPILATION_CACHE_DIR) as they
        are and counts nothing.
    """

    def __init__(self, folder: str):
        self._counts: collections.Counter[str] = collections.Counter()
        self._is_used = bool(folder)
        if not folder:
            return
        jax.config.update('jax_compilation_cache_dir', str(pathlib.Path(folder).resolve()))
        # JAX's own limits leave out programs that compile in less than a second; a run has dozens of them.
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
        jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
        jax.monitoring.register_event_listener(self._count)

    def take_metrics(self) -> dict[str, float]:
        """Returns 'programs/cached' and 'programs/compiled' since the last call; {} without a cache."""
        if not self._is_used:
            return {}
        metrics = {f'programs/{name}': float(self._counts[name]) for name in _EVENTS.values()}
        self._counts.clear()
        return metrics

    def _count(self, event: str, **_: object) -> None:
        if event in _EVENTS:
            self._counts[_EVENTS[event]] += 1


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
