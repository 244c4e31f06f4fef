"""Cost of the forest's operations, which must not grow with its size.

    PYTHONPATH=. python benchmarks/forest.py [--trees 1000 10000 100000] [--events 6] [--response 64]

Each tree holds a root, one child and `--events` waiting failures of `--response` tokens; prompts have 32 to 96 tokens. An
operation is one call on a random tree (sampling and dispatch: on the next one). A snapshot runs while another thread keeps
dispatching and answering. Each size runs in a process of its own. Wall times (median, 99th percentile) include whatever
else the machine does; CPU times are the thread's own. Needs no accelerator, and about 2 GB of memory for 100,000 trees.
"""

import argparse
import dataclasses
import multiprocessing
import os
import pathlib
import resource
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from configs import common
from deepgrpo.curriculum.base import Correction
from deepgrpo.curriculum.forest import Forest
from deepgrpo.types import Ids, Problem, as_ids

OPERATIONS = ("sample", "observe", "dispatch", "result")


class TimedLock:
    """A lock that remembers the longest time, wall and CPU, that it was held."""

    def __init__(self):
        self._lock = threading.Lock()
        self.longest_wall = self.longest_cpu = 0.0

    def __enter__(self):
        self._lock.acquire()
        self._since = time.perf_counter(), time.thread_time()

    def __exit__(self, *error):
        self.longest_wall = max(self.longest_wall, time.perf_counter() - self._since[0])
        self.longest_cpu = max(self.longest_cpu, time.thread_time() - self._since[1])
        self._lock.release()


@dataclasses.dataclass
class Result:
    trees: int
    memory: int  # bytes
    operations: dict[str, tuple[float, float, float]]  # (median us, p99 us, CPU us)
    snapshot: tuple[float, float]  # (wall, CPU) seconds
    hold: tuple[float, float]  # (wall, CPU) seconds: the longest hold of the lock while the snapshot ran
    restore: tuple[float, float]  # (wall, CPU) seconds
    disk: int  # bytes


def forest() -> Forest:
    """Without bounds, as the reference's."""
    config = common.get_config()
    config.model.path, config.rollout.max_model_len, config.strict_reference = "", 4096, True
    return Forest(config)


class Bench:
    def __init__(self, trees: int, events: int, response: int):
        self.rng = np.random.default_rng(0)
        self.trees, self.events, self.response = trees, events, response
        self.pool = forest()
        self.children: list[int] = []

    def responses(self, n: int) -> list[Ids]:
        return [as_ids(row) for row in self.rng.integers(0, 150_000, (n, self.response), np.int32)]

    def correction(self, failure) -> Correction:
        prefix, suffix = failure.response_ids[: self.response // 2], failure.response_ids[self.response // 2 :]
        return Correction(prefix, suffix, 1.0, suffix)

    def build(self) -> None:
        for i in range(self.trees):
            prompt = as_ids(self.rng.integers(0, 150_000, self.rng.integers(32, 97)))
            problem = Problem(i, "MATH", prompt, str(i), f"What is the answer to question number {i}?", {"level": "5"})
            self.pool.observe_root(problem, 0, 8, 1 + i // 128, self.responses(1))
            failure = self.pool.dispatch(1, 1 + i // 128)[0]
            self.children.append(self.pool.counters.next_node)
            self.pool.resolve(failure, self.correction(failure), 1 + i // 128)
            self.pool.observe_root(problem, 4, 8, 1 + i // 128, self.responses(self.events))

    def operations(self, calls: int) -> dict[str, tuple[float, float, float]]:
        step = 2 + self.trees // 128
        flying, timings = [], {}
        order = iter(self.rng.integers(0, self.trees, 4 * calls).tolist())

        timings["sample"] = timed(lambda _: self.pool.sample_rollout(1, step), [None] * calls)
        observed = [(self.children[next(order)], self.responses(4)) for _ in range(calls)]
        timings["observe"] = timed(lambda row: self.pool.observe_node(row[0], 4, 8, step, row[1]), observed)
        timings["dispatch"] = timed(lambda _: flying.extend(self.pool.dispatch(1, step)), [None] * calls)
        answers = [(failure, self.correction(failure)) for failure in flying]
        timings["result"] = timed(lambda answer: self.pool.resolve(*answer, step), answers)
        return timings

    def snapshot(self, folder: str) -> tuple[tuple[float, float], TimedLock]:
        """Times `state` (wall, CPU) while a teacher's thread works on the forest."""
        lock = self.pool.lock = TimedLock()
        stop = threading.Event()

        def teach() -> None:
            while not stop.wait(0.005):
                for failure in self.pool.dispatch(1, 10**6):
                    self.pool.resolve(failure, self.correction(failure), 10**6)

        teacher = threading.Thread(target=teach, daemon=True)
        teacher.start()
        seconds = stopwatch(lambda: self.pool.state(folder))
        stop.set()
        teacher.join(timeout=10)
        return seconds, lock


def stopwatch(call: Callable) -> tuple[float, float]:
    """Returns the (wall, CPU) seconds of one call."""
    start = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - start[0], time.thread_time() - start[1]


def timed(call: Callable, arguments: list) -> tuple[float, float, float]:
    """Returns (median, 99th percentile, mean CPU time) of the calls, in microseconds."""
    wall = np.zeros(len(arguments))
    cpu = time.thread_time()
    for i, argument in enumerate(arguments):
        start = time.perf_counter()
        call(argument)
        wall[i] = time.perf_counter() - start
    cpu = (time.thread_time() - cpu) / len(arguments)
    return float(np.median(wall) * 1e6), float(np.percentile(wall, 99) * 1e6), cpu * 1e6


def measure(trees: int, events: int, response: int, calls: int) -> Result:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bench = Bench(trees, events, response)
    bench.build()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    operations = bench.operations(min(calls, trees // 2))
    with tempfile.TemporaryDirectory(prefix="forest_") as folder:
        snapshot, lock = bench.snapshot(folder)
        disk = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
        restore = stopwatch(lambda: forest().restore(folder))
    return Result(trees, memory, operations, snapshot, (lock.longest_wall, lock.longest_cpu), restore, disk)


def table(results: list[Result], events: int, response: int) -> Table:
    rows = Table(title=f"Forest: trees x {events} waiting failures of {response} tokens ({os.cpu_count()} cores)")
    rows.add_column("operation")
    for result in results:
        rows.add_column(f"{result.trees:,} trees", justify="right")
    for name in OPERATIONS:
        cells = [result.operations[name] for result in results]
        rows.add_row(f"{name}: median / p99 / CPU, us", *[f"{p50:.0f} / {p99:.0f} / {cpu:.0f}" for p50, p99, cpu in cells])
    for name, unit, scale in (("snapshot", "s", 1), ("hold", "ms", 1e3), ("restore", "s", 1)):
        label = {"hold": "longest lock hold meanwhile"}.get(name, name)
        pairs = [getattr(result, name) for result in results]
        rows.add_row(f"{label}: wall / CPU, {unit}", *[f"{wall * scale:.2f} / {cpu * scale:.2f}" for wall, cpu in pairs])
    rows.add_row("snapshot on disk, MB", *[f"{result.disk / 1e6:.0f}" for result in results])
    rows.add_row("memory, MB", *[f"{result.memory / 1e6:.0f}" for result in results])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trees", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--events", type=int, default=6, help="waiting failures a tree")
    parser.add_argument("--response", type=int, default=64, help="tokens a failure")
    parser.add_argument("--calls", type=int, default=5_000, help="timed calls an operation (at most half the trees)")
    args = parser.parse_args()
    sizes = [(trees, args.events, args.response, args.calls) for trees in args.trees]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        results = processes.starmap(measure, sizes, chunksize=1)
    Console().print(table(results, args.events, args.response))


if __name__ == "__main__":
    main()
