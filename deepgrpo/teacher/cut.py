"""Where a new state ends, for the question whether the place matters: the teacher's cut, or another place of the same correction.

    teacher    where student and teacher part (the method)
    own        a random place before it: the student's own, right, but not all that is right
    random     a random place of the student's failed response, whether right so far or not
    solution   a random place of the teacher's verified solution, as of a worked example that is shown in part

All four ask the teacher the same and verify the same, so that they differ in nothing but the place. Only the first two keep the
teacher's suffix as what follows the state.
"""

import dataclasses
import zlib

import numpy as np

from deepgrpo.teacher.splice import Codec, Limits, Splice, back_off
from deepgrpo.types import Ids

PLACES = ("teacher", "own", "random", "solution")
PURPOSE = 0xC07  # keeps these draws apart from all others of the same seed


def move(cut: Splice, student: Ids, state_ids: Ids, place: str, *, codec: Codec, limits: Limits, seed: int) -> Splice:
    """The cut at `place`: a function of its arguments, with the same lengths of the match for the metrics.

    At least one token is kept and at least one left out; of special tokens (the response's stop id) none is kept. A place inside
    a number or mark is moved back to where that begins, at the very start of the text forward.

    Args:
      cut: an accepted one. student: int32[len], the response. state_ids: int32[len], what it continues.

    Returns:
      The new cut; its `reason` is no_room_for_rollouts, too_long, empty_suffix or prefix_too_short if that place does not exist.
    """
    if place == "teacher":
        return cut
    body = cut.body()
    source = body if place == "solution" else student
    special = np.flatnonzero(np.isin(source, list(codec.special_ids)))
    end = min(int(special[0]) if special.size else len(source), len(source) - 1)
    if place == "own":
        end = min(end, max(1, len(cut.prefix_ids) - 1))
    room = limits.max_model_len - limits.min_remaining_tokens - len(state_ids)
    if min(end, room) < 1:
        return dataclasses.replace(cut, reason="no_room_for_rollouts" if end >= 1 else "empty_suffix")
    fingerprint = zlib.crc32(np.concatenate([state_ids, student]).astype("<i4").tobytes())
    k = int(np.random.default_rng((seed, PURPOSE, fingerprint)).integers(1, min(end, room) + 1))
    text = codec.decode(source)
    first = (n for n in range(1, min(end, room) + 1) if back_off(codec, source[:n], text) == n)
    k = back_off(codec, source[:k], text) or next(first, 0)
    if not k:
        return dataclasses.replace(cut, reason="prefix_too_short")
    closing = cut.suffix_ids[cut.body_len :]
    follows = body[k:] if place != "random" or k <= len(cut.prefix_ids) else cut.suffix_ids[: cut.body_len]
    suffix = np.concatenate([follows, closing])
    if len(state_ids) + k + len(suffix) > limits.max_model_len:
        return dataclasses.replace(cut, reason="too_long")
    return dataclasses.replace(
        cut, prefix_ids=source[:k], suffix_ids=suffix, body_len=len(follows), failed_suffix_ids=student[k:]
    )
