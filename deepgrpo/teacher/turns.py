"""A teacher's text as a real conversation: played in the environment, turn by turn, before anything of it is believed.

What the teacher wrote between the turns must be what the environment answers; a reply that invents an answer is refused, so that
the teacher is asked again. The pieces are tokenised one by one, as a rollout's are, and the environment's tokens are marked.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from deepgrpo.environments.base import ENVIRONMENT, STUDENT, Environment, replay
from deepgrpo.environments.writing import Writer
from deepgrpo.types import Ids, Problem, marked, marks, plain


@dataclasses.dataclass(frozen=True)
class Played:
    """refused: why the text is no conversation, "" if it is one. deferred: that says nothing about it.

    so_far: of a text that invents an answer, what came before, with the environment's answer; from there another can go on.
    suffix_ids: int32[len], the text's tokens, those of the environment marked. parts: (who, text) from the problem's prompt on.
    """

    refused: str = ""
    deferred: bool = False
    so_far: str = ""
    suffix_ids: Ids | None = None
    parts: Sequence[tuple[str, str]] = ()


def play(environment: Environment, writer: Writer, problem: Problem, before: Ids, text: str) -> Played:
    """Plays `text`, the teacher's from where the student stopped.

    Args:
      before: int32[len], with marks: what stands between the problem's prompt and `text`. It ends in the student's turn.
    """
    episode = environment.open(problem, 0)
    try:
        parts = writer.parts(plain(before), marks(before))
        if failed := replay(environment, episode, parts):
            return Played(failed, deferred=True)
        begun = parts[-1][1] if parts and parts[-1][0] == STUDENT else ""
        pieces, rest = [], text
        while True:
            ends = [i + len(stop) for stop in environment.dialect.stop_texts if (i := rest.find(stop)) >= 0]
            end = min(ends, default=len(rest))
            words, rest = rest[:end], rest[end:]
            pieces.append((STUDENT, words))
            reply = episode.step(begun + words, bool(ends))
            begun = ""
            if reply.failed:
                return Played(reply.failed, deferred=True)
            if reply.observation is None:
                if rest.strip():
                    return Played("goes_on_after_its_end")
                break
            if not rest.startswith(reply.observation):
                return Played("invented_observation", so_far="".join(text for _, text in pieces) + reply.observation)
            pieces.append((ENVIRONMENT, reply.observation))
            rest = rest[len(reply.observation) :]
    finally:
        episode.close()
    ids = [np.array(writer.encode(piece), np.int32) for _, piece in pieces]
    observed = [np.full(len(piece), who == ENVIRONMENT) for (who, _), piece in zip(pieces, ids, strict=True)]
    return Played(suffix_ids=marked(np.concatenate(ids), np.concatenate(observed)), parts=(*parts, *pieces))
