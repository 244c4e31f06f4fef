"""What graders share: the answer that they see, the names of data sources, and the marks of a final answer.

The marks decide where graders find a final answer, and what no locked prefix may hold: boxes, `####`, answer tags, and "answer is
VALUE". A heading ("### Step 1"), a plan ("the answer: we add") and a name ("the answer is $x$, say") state nothing.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepgrpo.types import Grade

END_OF_TURN = re.compile(r"<\|(?:im_end|endoftext|eot_id|end_of_text|end)\|>|</s>|<\uff5cend\u2581of\u2581sentence\uff5c>")


@dataclasses.dataclass(frozen=True)
class Answer:
    """One response of the student, with its context.

    data_source: picks the grader.
    question: the user's text.
    prefix: text of the locked prefix: the model's earlier words, context only.
    response: what the student wrote now; the only part that can earn a reward.
    finish_reason: "stop" or "length".
    ground_truth: the row's key, JSON-serialisable.
    extra: further columns of the row, JSON-serialisable.
    validation: the answer is scored for a report, not for training; some sources then leave bonuses out.
    prompt: all the text that the engine was given, chat markers and locked prefix included; "" where only the question is known.
    ending: text of the sampled end-of-turn token, which `response` is without.
    parts, prefix_parts: (who, text) of response and locked prefix, `types.STUDENT` or ENVIRONMENT; `response` and
      `prefix` are then the student's words alone. Empty where no environment takes part.
    """

    data_source: str
    question: str
    prefix: str
    response: str
    finish_reason: str
    ground_truth: Any
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    validation: bool = False
    prompt: str = ""
    ending: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    prefix_parts: tuple[tuple[str, str], ...] = ()

    @property
    def transcript(self) -> str:
        """Prompt and response as one text, which the public reference grades. No other grader should read it."""
        return (self.prompt or self.question + "\n" + self.prefix) + self.response + self.ending


def own_words(text: str) -> str:
    """Returns `text` up to its first end-of-turn token: what follows belongs to nobody."""
    end = END_OF_TURN.search(text)
    return text[: end.start()] if end else text


def usable_keys(ground_truth: Any) -> list[str]:
    """Returns the accepted answers of a row, without empty ones."""
    keys = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    return [text for key in keys if key is not None and (text := str(key).strip())]


#### Data sources

# The name here of the grader for the names that other projects give to data sources. A file keeps its own names, in metrics too.
# DeepScaleR's grader takes a boxed answer or a declared one ("Answer: 34"), which is what prompts in the manner of DAPO ask for.
_ALIASES = {
    "GSM8K": "openai/gsm8k gsm8k openai/grade-school-math",
    "MATH": "lighteval/math huggingfaceh4/math-500 math-500 math500 hendrycks_math digitallearninggmbh/math-lighteval "
    "eleutherai/hendrycks_math math-ai/math500",
    "DeepScaleR": "math math_dapo math_dapo_reasoning bytedtsinghua-sia/dapo-math-17k deepscaler "
    "agentica-org/deepscaler-preview-dataset open-r1/openr1-math-220k numina_aops_forum numina_synthetic_math numina_amc_aime "
    "numina_synthetic_amc numina_cn_k12 numina_olympiads ai-mo/numinamath-tir maxwell-jia/aime_2024 huggingfaceh4/aime_2024 "
    "math-ai/aime24 math-ai/aime25 opencompass/aime2025 ai-mo/aimo-validation-aime",
    "AMC": "amc23 math-ai/amc23 ai-mo/aimo-validation-amc",
    "Minerva": "minerva_math minervamath math-ai/minervamath",
    "OlympiadBench": "olympiad_bench math-ai/olympiadbench",
    **{name: f"searchr1_{name}" for name in ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")},
}
ALIASES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_CASELESS = {name.lower(): name for name in ("GSM8K", "MATH", "AMC", "Minerva", "OlympiadBench", "AIME24")} | ALIASES


def canonical(source: str) -> str:
    """Returns the name here of a source's grader: `source` itself if no other is known for it."""
    folded = source.lower()
    if source in ALIASES.values():
        return source
    return _CASELESS.get(folded) or ("DeepScaleR" if folded.startswith("aime") else source)  # as verl has it


#### Marks of a final answer

BOX = r"\\(?:boxed|fbox|framebox)(?![A-Za-z])"
TAG = r"<\s*/?\s*answer\b"
_HEADING = (
    r"(?:step|part|case|section|phase|given|solution|approach|explanation|first|next|then|let|calculat|comput|find|determin|"
    r"identify|understand|analy[sz]|add|subtract|multipl|divid|convert|check|verif)"
)
_WRAP = r"[\s*$~=({\[\"'`_]"
_NUMBER = rf"{_WRAP}{{0,20}}(?:\\boxed|[-+]?[\s$]{{0,3}}\.?\d)(?!\d{{0,3}}[.):]\s+[A-Za-z])"  # "### 2. Add them" is a heading
HASHES = rf"(?<!#)####(?!#)(?!{_WRAP}{{0,20}}{_HEADING})|(?<!#)#{{3,}}(?=[^\S\n]*\n?{_NUMBER})"
_IS = r"\banswer\b[*_]{0,3}(?:\s{1,3}(?:is|was|equals)\b|\s{0,3}[:=])"
_FILLER = (
    r"(?:[\s:=~$*_(\[{|\"`]|\\[(\[{]|\\left\b|therefore\b|thus\b|then\b|just\b|simply\b|exactly\b|about\b|"
    r"approximately\b|equal to\b|\\(?:text|mathbf|textbf|mathrm)\{|(?:option|choice)\b|\\?[a-z]+\s?=(?!=))*+"
)
_VALUE = (
    r"(?:[-+]?\s?(?:[\u20ac\u00a3]|\\\$)?\.?\d|[-+]?[a-z]{0,2}\\(?:[dt]?frac|sqrt|pi|infty|emptyset|varnothing|begin|binom)|"
    r"(?-i:[A-J])(?=[).,;:}*\s]*(?:[\n).}*]|$))|[a-z]\s?[-+*/^](?:[a-z](?![a-z])|[-+*/^(){} ]){0,20}\d)"
)
SAID = rf"{_IS}(?={_FILLER}{_VALUE})"  # in front of a value
BEGUN = rf"{_IS}{_FILLER}(?:\\[a-z]*)?\Z"  # the value is about to come
FINAL = r"\bfinal answer\b[*_]{0,3}(?:\s{1,3}is\b|\s{0,3}:)[\s*_]{0,5}(?:[^\W\d_]+[ \-]?){1,3}(?:[.!*_]|\n|\Z)"  # a word or two
DECLARED = f"{SAID}|{BEGUN}|{FINAL}"

# What is one mark or one word: a prefix that ends inside of one leaves it to the response.
_UNIT = re.compile(
    rf"{_IS}|\\[A-Za-z]+\s*\{{?|\\.|#+|<[\s/]*[A-Za-z]*\s*>?|@\w*\[?|(?<![\w)])[-+\u2212]?\d(?:,?\d)*(?:\.\d+)?|\d(?:,?\d)*(?:\.\d+)?|[^\W\d_]+|```\w*|\*+",
    re.IGNORECASE,
)
MAX_STATED = 20  # final answers of a response that are looked at
_WINDOW = 300  # characters of a prefix's last line that are looked at


def worst(grades: Iterable[Grade]) -> Grade:
    """Returns the grade of a response with several final answers: a wrong one among them is hedging, a repetition is not."""
    return min(grades, key=lambda grade: grade.reward or 0.0, default=Grade(0.0, False, "unformatted"))


def whole(answer: Answer) -> Answer:
    """`answer` with the boundary of locked prefix and response moved to the front of the mark, word or number that it cuts.

    So `The answer is \\` + `boxed{42}` says what the whole says. A mark that the prefix holds complete stays there, and earns
    nothing.
    """
    end = len(answer.prefix)
    unit = unit_at(answer.prefix + own_words(answer.response), end)
    if unit is None:
        return answer
    prefix, begun = answer.prefix[: unit[0]], answer.prefix[unit[0] :]
    return dataclasses.replace(answer, prefix=prefix, response=begun + answer.response, prompt=answer.prompt.removesuffix(begun))


def unit_at(text: str, place: int) -> tuple[int, str] | None:
    """Returns the mark, word or number that a place in a text is inside of: where it begins, and what it is."""
    start = max(text.rfind("\n", 0, place) + 1, place - _WINDOW)
    for unit in _UNIT.finditer(text, start, place + _WINDOW):
        if unit.start() < place < unit.end():
            return unit.start(), unit.group()
        if unit.end() >= place:
            break
    return None


def tagged_answers(answer: Answer, lenient: bool) -> list[str]:
    """Returns what stands between R1-style answer tags behind the thoughts, without repetitions; empty if the format is broken.

    Strict, as Dr. GRPO's r1 template is scored: the text must hold exactly `</think> <answer>`, and `</answer>`. Lenient: both
    answer tags, anywhere. The opening tag must be the student's own; the thoughts that close before it may have begun in a
    locked prefix.
    """
    text = answer.prefix + own_words(answer.response)
    if not (lenient or "</think> <answer>" in text):
        return []
    own = text[len(answer.prefix) :]
    for part in (own.rpartition("</think>")[2], own):
        pieces = part.split("</answer>")
        found = [piece.rpartition("<answer>")[2] for piece in pieces[:-1] if "<answer>" in piece]
        if found and "<answer>" not in pieces[-1]:
            return list(dict.fromkeys(" ".join(text.split()) for text in found[-MAX_STATED:]))
    return []
