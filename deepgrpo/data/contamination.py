"""Held-out questions that a training set contains: word for word, in other spelling, reworded a little, or inside a longer text.

Word for word: the words, numbers and operators are the same; case, white space, dollars, braces, punctuation and LaTeX's layout
don't count. Reworded: most 8-grams are shared, and without function words ("compute", "find", "the") the same words remain.
Contained: all words of one, in order, are a part of the other. These three make a score too good.

Similar: most 8-grams are shared, but a number or a word that matters differs. The official training and test files of MATH are
full of such pairs, which are different problems; they are worth a look and not held against anyone.
"""

import collections
import dataclasses
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence

GRAM = 8  # words; 8 and 13 are the field's usual lengths
SHORTEST = 13  # words; of shorter questions only equal ones are the same
SHARED = 0.6  # of the shorter question's 8-grams
COMMON = 0.02  # 8-grams in a larger part of a set's questions belong to its prompt

_INSTRUCTION = re.compile(
    r"\s*(?:let's think|let us think|let's reason|please reason|please think)\s+step by step[^\n]{0,160}\s*$", re.IGNORECASE
)
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|math[a-z]+|text[a-z]*|mbox|q?quad|[bB]igg?[lr]?|[lc]?dots[a-z]?)(?![A-Za-z])|\\[!\[\]()]|\{,\}"
)
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[-+*/^=<>|%&@#()\[\]]|(?<=[\d)}])!|(?<=\b[a-z])!")  # 5! and n!, not Help!
_SAME = {"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "geq": "ge", "neq": "ne", "cdot": "*", "times": "*"}
_DASHES = dict.fromkeys(map(ord, "\u2212\u2010\u2011\u2012\u2013\u2014"), "-")
_FUNCTION_WORDS = frozenset(
    "a an the and or if then let suppose that this be is are was of for to in on with where what which compute find determine "
    "evaluate calculate value express give your answer as please how".split()
)

Words = tuple[str, ...]
Pairs = tuple[tuple[int, int], ...]  # (held-out index, training index)


@dataclasses.dataclass(frozen=True)
class Overlap:
    """Which held-out question has which training question for its double; each once, in the first list that it fits."""

    exact: Pairs = ()
    near: Pairs = ()  # reworded or contained
    similar: Pairs = ()

    @property
    def found(self) -> Pairs:
        """What makes a score too good."""
        return self.exact + self.near


def words(question: str) -> Words:
    """A question without what doesn't make it another one: spellings of one symbol, layout, an instruction at its end."""
    text = unicodedata.normalize("NFKC", question).translate(_DASHES)
    text = _LAYOUT.sub(lambda found: "," if found.group() == "{,}" else "", _INSTRUCTION.sub("", text))
    found = (_SAME.get(word, word) for word in _WORD.findall(text.lower()))
    return tuple(re.sub(r",(?=\d{3}(?!\d))", "", word) if word[0].isdigit() else word for word in found)  # 1,000 is 1000


def overlap(train: Sequence[str], held_out: Sequence[str]) -> Overlap:
    """Compares two lists of questions, in time and memory that grow with their length, not with its square."""
    train_words, held_words = [words(text) for text in train], [words(text) for text in held_out]
    first: dict[Words, int] = {}
    for index, text in enumerate(train_words):
        first.setdefault(text, index)
    exact = {index: first[text] for index, text in enumerate(held_words) if text and text in first}
    near, similar = _alike(train_words, held_words, exact)
    return Overlap(*(tuple(sorted(found.items())) for found in (exact, near, similar)))


def _alike(train: list[Words], held_out: list[Words], skip: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    held_grams = [_grams(text) for text in held_out]
    usual = _usual(held_grams)
    where: dict[Words, list[int]] = collections.defaultdict(list)
    for held, grams in enumerate(held_grams):
        grams -= usual
        if held not in skip:
            for gram in grams:
                where[gram].append(held)
    hits = [[gram for gram in _grams(text) if gram in where] for text in train]
    usual = _usual(hits)
    near: dict[int, int] = {}
    similar: dict[int, int] = {}
    for index, grams in enumerate(hits):
        shared = collections.Counter(held for gram in grams if gram not in usual for held in where[gram])
        for held, count in shared.items():
            if count >= SHARED * min(len(train[index]) - GRAM + 1, len(held_grams[held])):
                same = _contained(train[index], held_out[held]) or _reworded(train[index], held_out[held])
                (near if same else similar).setdefault(held, index)
    return near, {held: index for held, index in similar.items() if held not in near}


def _grams(text: Words) -> set[Words]:
    return {text[i : i + GRAM] for i in range(len(text) - GRAM + 1)} if len(text) >= SHORTEST else set()


def _usual(grams: Sequence[Collection[Words]]) -> set[Words]:
    """8-grams that so many texts of a set have that they belong to its prompt."""
    seen = collections.Counter(gram for own in grams for gram in own)
    return {gram for gram, count in seen.items() if count > max(10, COMMON * len(grams))}


def _contained(one: Words, other: Words) -> bool:
    short, long = sorted((f" {' '.join(text)} " for text in (one, other)), key=len)
    return short in long


def _reworded(one: Words, other: Words) -> bool:
    """Same words that matter; for prose only, as the order of a formula's symbols matters."""
    content = [collections.Counter(word for word in text if word not in _FUNCTION_WORDS) for text in (one, other)]
    return content[0] == content[1] and sum(len(word) > 2 and word.isalpha() for word in one) >= 5
