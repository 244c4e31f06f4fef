"""What the replays of recorded pool traces share.

What is random is recorded as probabilities: each is compared with the exact probability that follows from the pool's weights, and
that with what many draws of the pool come to.
"""

import json
import tempfile

import numpy as np

from deepgrpo.curriculum.saved_rows import Saved, read_saved, write_saved
from deepgrpo.types import Problem, as_ids

DRAWS = 1000
TOLERANCE = 0.08  # of a frequency over so many draws: five standard deviations


def problem(prompt=(1,)) -> Problem:
    return Problem(0, "trace", as_ids(list(prompt)), "", "")


def reloaded(saved: Saved, record: type) -> Saved:
    with tempfile.TemporaryDirectory() as folder:
        write_saved(folder, "pool", saved)
        return read_saved(folder, "pool", record)


def assert_close(found, expected, where):
    """Equal, numbers within 1e-6, however deeply they lie."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), (where, found, expected)
        for key in expected:
            assert_close(found[key], expected[key], f"{where}: {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (where, found, expected)
        for i, pair in enumerate(zip(found, expected, strict=True)):
            assert_close(*pair, f"{where}: [{i}]")
    elif isinstance(expected, float):
        assert abs(found - expected) <= 1e-6, (where, found, expected)
    else:
        assert found == expected, (where, found, expected)


def inclusion(weights: list[float], k: int) -> list[float]:
    """Probability of each item to be among the first k of successive draws proportional to weight, zero weights last."""
    found = [0.0] * len(weights)

    def draw(left: tuple[int, ...], k: int, probability: float) -> None:
        total = sum(weights[i] for i in left)
        if k >= len(left) or total <= 0:  # then in the order given
            for i in left[:k]:
                found[i] += probability
            return
        for i in left:
            if k and weights[i] > 0:
                chance = probability * weights[i] / total
                found[i] += chance
                draw(tuple(j for j in left if j != i), k - 1, chance)

    draw(tuple(range(len(weights))), k, 1.0)
    return found


class Replay:
    """One scenario of one pool."""

    prefix = ""  # of the trace's statistics

    def __init__(self, config: dict):
        self.config = config
        self.pool = self.create(config)
        self.random = np.random.default_rng(0)

    def run(self, ops: list[dict], stat_keys: list[str] | None) -> None:
        for number, op in enumerate(ops):
            where = f"operation {number}: {op['op']} {json.dumps(op['args'])}"
            expected = op["result"]
            if isinstance(expected, dict) and "error" in expected:
                try:
                    found = {"returned": getattr(self, op["op"])(**op["args"])}
                except ValueError:
                    found = {"error": "invalid_argument"} | ({"size_after": len(self.pool)} if "size_after" in expected else {})
            else:
                found = getattr(self, op["op"])(**op["args"])
            self.check(op, found, where)
            if "stats" in op:
                stats = dict(zip(stat_keys, op["stats"], strict=True)) if stat_keys else op["stats"]
                metrics = self.pool.metrics()
                assert_close({name: metrics[self.prefix + name] for name in stats}, stats, where)

    def check(self, op, found, where):
        assert_close(found, op["result"], where)
