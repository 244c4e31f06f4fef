"""Text of a conversation to ids and back: observations as a student reads them, and the parts of a trace.

In a chat a template adds ids between the student's message and the tool's, and between that and the student's next one.
"""

import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import tokenizers

from deepgrpo.types import ENVIRONMENT, STUDENT, Ids, as_ids

CUT = " [...] "  # stands where the middle of a long observation was
MOST_CHARACTERS = 16  # of a token: beyond as many of an observation it is cut before it is tokenised
_TEXT = "OBSERVATION"
_DIALOGUES = (  # what the student says, and what tools answer
    ("plain", "It is 4.", [_TEXT]),
    ("with thoughts", "<think>\nLet me see.\n</think>\n\nIt is 4.", [_TEXT]),
    ("two observations in a row", "It is 4.", ["first", _TEXT]),
    ("an empty message", "", [_TEXT]),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Boundary:
    """before: ids after the student's end-of-turn token, up to the observation. after: up to the student's next word."""

    before: Ids
    after: Ids

    @classmethod
    def of(cls, tokenizer: Any) -> "Boundary":
        """Found by rendering dummy dialogues.

        Raises:
          ValueError: the template is not append-only: what it writes for a dialogue changes when the dialogue goes on.
        """
        found = None
        for name, said, observations in _DIALOGUES:
            messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": said}]
            begun = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
            opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
            messages += [{"role": "tool", "content": text} for text in observations]
            whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for shorter in (opened + said, begun):
                if not whole.startswith(shorter):
                    at = next(i for i, (a, b) in enumerate(zip(shorter, whole + "\0", strict=False)) if a != b)
                    raise ValueError(
                        f"the chat template is not append-only ({name}): once a tool has answered, it writes "
                        f"{whole[at : at + 40]!r} where it wrote {shorter[at : at + 40]!r} before; use an environment whose "
                        "turns stand in one message, or another template"
                    )
            ended, end = whole[len(opened) + len(said) :], tokenizer.eos_token
            if not ended.startswith(end):
                raise ValueError(f"the chat template ends a message with {ended[:20]!r}, expected the end-of-turn token {end!r}")
            if name == "plain":
                before, _, after = ended[len(end) :].partition(_TEXT)
                encode = lambda text: as_ids(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
                found = cls(encode(before), encode(after))
        return found


class Writer:
    """Encodes observations. Its tokenizer is its own, safe in any thread; special tokens in a text are ordinary text to it."""

    def __init__(self, tokenizer: Any):
        self._boundary = functools.cache(lambda: Boundary.of(tokenizer))
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def observation(self, text: str, chat: bool, most: int) -> tuple[Ids, bool]:
        """The ids of an observation with what parts it from the turns in a chat, and whether its middle was cut.

        most: tokens that the text may have.
        """
        if len(text) > MOST_CHARACTERS * most:  # nobody tokenises ten megabytes to throw them away
            text = text[: MOST_CHARACTERS * most // 2] + text[-MOST_CHARACTERS * most // 2 :]
        ids, cut = self.encode(text), False
        if len(ids) > most:
            middle, cut = self.encode(CUT), True
            room = max(0, most - len(middle))
            ids = [*ids[: room - room // 2], *middle, *ids[len(ids) - room // 2 :]][:most]
        if chat:
            boundary = self._boundary()
            ids = [*boundary.before, *ids, *boundary.after]
        return as_ids(ids), cut

    def encode(self, text: str) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # half a character becomes a question mark
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def parts(self, ids: Ids, observed: np.ndarray | None) -> list[tuple[str, str]]:
        """(who, text) of each piece of a trace. observed: bool[len]."""
        return [(who, self.decode(piece)) for who, piece in pieces(ids, observed)]


def pieces(ids: Ids, observed: np.ndarray | None) -> list[tuple[str, Ids]]:
    """The longest pieces of a trace that one wrote: (who, ids). observed: bool[len]; None: the student wrote all."""
    if observed is None:
        return [(STUDENT, ids)] if len(ids) else []
    ends = [0, *(np.flatnonzero(np.diff(observed)) + 1).tolist(), len(ids)]
    return [(ENVIRONMENT if observed[a] else STUDENT, ids[a:b]) for a, b in itertools.pairwise(ends) if a < b]


@functools.lru_cache(maxsize=8)
def writer_of(tokenizer: Any) -> Writer:
    return Writer(tokenizer)
