"""Sums of three numbers, `a + b + c = ?`: real arithmetic that a 135M instruction-tuned model is just able to learn on a CPU."""

import zlib

import numpy as np

NAME = "arithmetic"  # its data_source
SPLITS = ("train", "heldout")
HELD_OUT_SHARE = 5  # one sum in so many is never trained on
IN_PROMPT = frozenset({(4, 5, 3), (8, 7, 6)})  # the worked examples of the few-shot template


def problems(split: str, count: int, digits: int = 2) -> list[dict[str, str]]:
    """The first `count` problems of a split: the same for everyone, all different, and never in the other split.

    Returns:
      Rows with `question`, `answer` and `data_source`.

    Raises:
      ValueError: unknown split, digits outside 1..3, or more problems than there are.
    """
    if split not in SPLITS or not 1 <= digits <= 3:
        raise ValueError(f"{NAME}: split must be one of {SPLITS} and digits 1 to 3, got {split!r} and {digits}")
    low, high = (1, 9) if digits == 1 else (10 ** (digits - 1), 10**digits - 1)
    rng = np.random.default_rng((SPLITS.index(split), digits))
    chosen: dict[tuple[int, int, int], None] = {}
    for _ in range(200):  # blocks; one-digit sums are few, so that the last ones come late
        for a, b, c in rng.integers(low, high + 1, size=(max(count, 256), 3)).tolist():
            held_out = zlib.crc32(f"{a}+{b}+{c}".encode()) % HELD_OUT_SHARE == 0
            if held_out == (split == "heldout") and (a, b, c) not in IN_PROMPT:
                chosen[a, b, c] = None
            if len(chosen) == count:
                return [{"question": f"{a} + {b} + {c} = ?", "answer": str(a + b + c), "data_source": NAME} for a, b, c in chosen]
    raise ValueError(f"{NAME}: the {split} split of {digits}-digit sums has only {len(chosen)} problems, {count} were asked for")
