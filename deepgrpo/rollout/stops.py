"""Where a turn ends that is handed over by a text: one rule for both engines, over token ids.

A turn ends with the first token at which its text contains one of the stop texts. That token stays whole, whatever text follows
in it (`>\\n` is one token of many vocabularies, and `</search>` is three), and ids after it are no part of the turn.
"""

from collections.abc import Sequence
from typing import Any

MAY_BE_PARTIAL = "\ufffd"  # what a token decodes to that holds a part of a character


class StopTexts:
    """Finds the end of a turn. For the thread that owns `tokenizer`.

    texts: none empty, and none part of another.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        """Raises ValueError: a text is empty, or part of another."""
        for text in texts:
            if not text or any(text in other and text != other for other in texts):
                raise ValueError(
                    f"stop texts {tuple(texts)}: {text!r} is empty or part of another; each must end a turn by itself"
                )
        self.texts = tuple(texts)
        self._tokenizer, self._last = tokenizer, {text[-1] for text in texts}
        self._may_end: dict[int, bool] = {}
        self._alone: dict[int, tuple[int, ...]] = {}

    def length(self, ids: Sequence[int], checked: int = 0) -> int:
        """Tokens of the turn `ids` up to its end, that token included; 0: no stop text is in it.

        checked: leading ids of which it is known that they do not end the turn.
        """
        for n in range(checked + 1, len(ids) + 1):
            if self._can_end(int(ids[n - 1])):
                text = self._tokenizer.decode(list(map(int, ids[:n])))
                if any(stop in text for stop in self.texts):
                    return n
        return 0

    def ids(self, bound: int) -> tuple[int, ...]:
        """Those ids below `bound` that end a turn by themselves, whatever came before: a device can stop at them."""
        if bound not in self._alone:
            pieces = self._tokenizer.batch_decode([[token] for token in range(bound)])
            self._alone[bound] = tuple(i for i, piece in enumerate(pieces) if any(text in piece for text in self.texts))
        return self._alone[bound]

    def _can_end(self, token: int) -> bool:
        """Whether the text may become one with a stop text by this token: it holds the last character of one, or a part of it."""
        if token not in self._may_end:
            piece = self._tokenizer.decode([token, token])  # twice: some decoders drop a text's leading space
            self._may_end[token] = MAY_BE_PARTIAL in piece or any(last in piece for last in self._last)
        return self._may_end[token]
