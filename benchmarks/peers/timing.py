"""Timing and output of the benchmark scripts; standard library only, like `workload`."""

import argparse
import statistics
import time
from collections.abc import Callable

from benchmarks.peers import workload


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the median wall-clock time of `repeats` calls in seconds, after one call that is not timed."""
    # The first call compiles programs, allocates memory and fills caches.
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def print_rates(
    engine: str, rollouts: workload.Rollouts, rollout_seconds: float, update_seconds: float
) -> None:
    """Prints the two lines that `benchmarks.rollout` reads: generated tokens/s and update tokens/s."""
    generated_rate = rollouts.generated / rollout_seconds
    update_rate = workload.TRAIN_BATCH * workload.TRAIN_LEN / update_seconds
    print(f'{engine} rollout {generated_rate:.1f} generated tokens/s ({rollout_seconds:.2f} s)')
    print(f'{engine} train {update_rate:.1f} tokens/s ({update_seconds:.2f} s)')


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of the arguments that all engines take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument(
        'repeats', type=int, nargs='?', default=3, help='timed calls; the median counts'
    )
    arguments.add_argument(
        '--workload', choices=workload.WORKLOADS, default='even', help='batch of rollouts (even)'
    )
    return arguments
