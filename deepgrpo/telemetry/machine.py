"""What a step asks of the machine: memory in use, and how evenly its rows can be dealt to the devices."""

import heapq
import pathlib
import resource
import sys
from collections.abc import Sequence

import jax

from deepgrpo.learner.rows import STREAM_NAMES, Row

GB = 1e9


def memory() -> dict[str, float]:
    """`perf/max_memory_{allocated,reserved}_gb`, the most of any local device since the start, where its backend tells;
    `perf/cpu_memory_used_gb` of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    metrics = {"perf/cpu_memory_used_gb": resident() / GB}
    for name, keys in (("allocated", ("peak_bytes_in_use",)), ("reserved", ("peak_pool_bytes", "peak_bytes_reserved"))):
        found = [s[key] for s in stats for key in keys if key in s]
        if found:
            metrics[f"perf/max_memory_{name}_gb"] = max(found) / GB
    return metrics


def resident() -> int:
    """Bytes of memory that this process has now; where the system does not tell, the most that it had."""
    table = pathlib.Path("/proc/self/statm")
    if table.exists():
        return int(table.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def sequence_lengths(rows: Sequence[Row], shards: int) -> dict[str, float]:
    """`{main,branch,teacher}_seqlen/*`: tokens that each of the learner's `shards` would get of a stream's training rows.

    min, max, minmax_diff, mean: dealt in their order, in equal numbers. balanced_min, balanced_max: the longest first, each to
    whoever has least.
    """
    metrics = {}
    for source, name in STREAM_NAMES.items():
        lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows if row.source == source]
        if not lengths:
            continue
        bounds = [len(lengths) * shard // shards for shard in range(shards + 1)]
        dealt = [sum(lengths[a:b]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
        even = [0] * shards
        for length in sorted(lengths, reverse=True):
            heapq.heapreplace(even, even[0] + length)
        values = {"min": min(dealt), "max": max(dealt), "minmax_diff": max(dealt) - min(dealt), "mean": sum(dealt) / shards}
        values |= {"balanced_min": min(even), "balanced_max": max(even)}
        metrics |= {f"{name}_seqlen/{key}": float(value) for key, value in values.items()}
    return metrics
