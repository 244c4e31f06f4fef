"""From a response to clean answer text: finding boxes, and one spelling for everything LaTeX and Unicode spell in several ways.

Clean text keeps the LaTeX commands of mathematics, and marks prose: `\\text{and}` becomes TEXT_OPEN + "and" + TEXT_CLOSE, so that
the later stages can tell words from products of variables. A row break of a matrix becomes ROW.
"""

import dataclasses
import functools
import re
import unicodedata
from fractions import Fraction

from deepgrpo.rewards.answer import BOX

TEXT_OPEN, TEXT_CLOSE, ROW = "\x02", "\x03", "\x04"
MAX_RAW = 10_000  # characters of a box before cleaning

_BOX = re.compile(r"\\boxed(?![A-Za-z])")
_OTHER_BOX = re.compile(BOX)  # where there is none of the first kind
_RUN = re.compile(r"\s{20,}")
_JOIN = re.compile(  # what may stand between boxes of one list
    r"(?:[\s$.,;:&\\\[\]()*{}!]|\\q?quad|\\text|\\mbox|\band\b|\bor\b|[A-Za-z](?:_\{?\d\}?)?\s*=)*"
)


#### Boxes


def last_boxes(text: str) -> list[str] | None:
    """Returns the contents of the last box, and of the boxes right before it that are joined to it by commas, "and" or "or".

    `\\boxed5` and white space before the brace are fine; of nested boxes the innermost counts. Escaped braces do not nest.

    Returns:
      The contents in order of appearance, or None if there is no box or the last one is unclosed.
    """
    found: list[str] = []
    text = squeezed(text)
    limit = len(text)
    for match in reversed(_tail_boxes(text)):
        content = _content(text, match.end())
        if content is None:
            return found or None
        inside, end = content
        between = text[end:limit]
        if found and (end > limit or len(between) > 40 or not _JOIN.fullmatch(between) or len(found) == 50):
            break
        found.insert(0, inside)
        limit = match.start()
    return found or None


def boxes(text: str) -> list[str]:
    """Returns the contents of all the last 51 boxes that are closed, in order."""
    return [content[0] for match in _tail_boxes(text) if (content := _content(text, match.end()))]


def _tail_boxes(text: str) -> list[re.Match]:
    start = max(0, len(text) - 200_000)
    return list(_BOX.finditer(text, start))[-51:] or list(_OTHER_BOX.finditer(text, start))[-51:]


def squeezed(text: str) -> str:
    """Returns `text` with each long run of white space as one character."""
    return _RUN.sub(lambda m: "\n" if "\n" in m.group() else " ", text)


def _content(text: str, start: int) -> tuple[str, int] | None:
    """Returns the argument of a box command that ends at `start`, and the index after it; None if it never closes."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start >= len(text):
        return None
    if text[start] != "{":
        bare = re.compile(r"-?\d+(?:\.\d+)?|\\[A-Za-z]+|[^\s\\]").match(text, start)
        return (bare.group(), bare.end()) if bare else None
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None


#### One spelling


def _table(text: str) -> dict[str, str]:
    """Reads entries "new: old old;" into a dictionary from old to new. A command gets the space that ends its name."""
    entries = (entry.strip().partition(": ") for entry in text.split(";"))
    return {old: new + " " * (new[:1] == "\\" and new[1:].isalpha()) for new, _, olds in entries for old in olds.split()}


_UNICODE = _table(
    r"""\times: ×; \cdot: ⋅ · ∙; /: ÷ ⁄ ∕; \sqrt: √; \sqrt[3]: ∛; \infty: ∞; \le: ≤ ⩽; \ge: ≥ ⩾; \ne: ≠; \approx: ≈; \pm: ±;
    \mp: ∓; \cup: ∪; \cap: ∩; \in: ∈; \setminus: ∖; \emptyset: ∅; \mathbb{R}: ℝ; \mathbb{Z}: ℤ; \lfloor: ⌊; \rfloor: ⌋; \land: ∧;
    \lor: ∨; \implies: ⇒ ∴; \to: →; \angle: ∠; \phi: ϕ; \degree: ° º ˚; \text{ cents}: ¢; \text{ Angstrom}: Å; ': ′ ’; '': ″;
    ": “ ” ‘ `"""
) | dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d", "-")
_SUPERSCRIPTS = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b\u207f", "0123456789+-n")
_SUPERSCRIPT_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b\u207f]+")
_SUBSCRIPT_RUN = re.compile("[\u2080-\u2089]+")

_RENAMED = _table(
    r"""\frac: dfrac tfrac cfrac nicefrac sfrac; \binom: dbinom tbinom; \le: leq leqslant; \ge: geq geqslant; \ne: neq; <: lt;
    >: gt; \degree: degrees deg; \{: lbrace; \}: rbrace; [: lbrack; ]: rbrack; (: langle lparen; ): rangle rparen; *: ast;
    |: lvert rvert vert; \cdot: cdotp; ': prime; \setminus: backslash smallsetminus; \emptyset: varnothing; \cup: bigcup;
    \cap: bigcap; \sqrt: surd; \tan: tg; \cot: ctg; \arccot: arccot; i: imath jmath; Angstrom: AA; \$: textdollar;
    \text{ or }: lor vee; \text{ and }: land wedge; \implies: Rightarrow Longrightarrow therefore implies"""
)
_RENAMED |= {"colon": ":", "newline": ROW} | dict.fromkeys("quad qquad enspace thinspace".split(), " ")
_RENAMED |= dict.fromkeys(  # what only concerns the looks
    """left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle scriptstyle limits bf rm it sf
    tt bm boldmath boxed fbox framebox mathbf boldsymbol mathit underline emph ensuremath Huge huge LARGE Large large normalsize
    small footnotesize tiny checkmark blacksquare square Box qed""".split(),
    "",
)
_TEXT_GROUP = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|mathrm|mathsf|mathtt|operatorname)\*?\s*\{"
    r"((?:[^{}]|\^\{[^{}]*\})*)\}"
)
_INNER_GROUP = re.compile(rf"{TEXT_OPEN}([^{TEXT_OPEN}{TEXT_CLOSE}]*){TEXT_OPEN}([^{TEXT_OPEN}{TEXT_CLOSE}]*){TEXT_CLOSE}")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s?")
_COLOR = re.compile(
    r"\\(?:textcolor|colorbox|color)\s*(?:\{[^{}]*\}|[a-z]+)|\\(?:[hv]space\*?|h?phantom|tag\*?|label)\s*\{[^{}]*\}"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{(?:align|aligned|gather|gathered|cases|split|equation|center)\*?\}")
_FUNCTION_NAME = re.compile(  # \text{ sec} is a unit
    r"\\(?:operatorname\*?\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp)|"
    r"(?:text|mathrm)\s*\{\s*(arcsin|arccos|arctan|sin|cos|tan|cot|csc|ln|log|exp))\s*\}"
)
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)(?:\\overline\s*\{(\d+)\}|(?:\\dot\s*\{?(\d)\}?|\((\d+)\))(?!\d|\.\d))")
_DERIVATIVE = re.compile(
    r"\\frac\s*\{\s*d(?:\^\{?(\d)\}?)?\s*([A-Za-z])(\([A-Za-z]\))?\s*\}\s*\{\s*d\s*([A-Za-z])(?:\^\{?\d\}?)?\s*\}"
)


def clean(raw: str) -> str:
    """Returns `raw` in this module's one spelling. Linear in its length but for a bounded number of nested text groups."""
    text = _ascii(squeezed(raw))
    text = re.sub(r"\\\\(?:\[[^\]]*\])?|\\tabularnewline|\\cr\b", ROW, text)
    text = re.sub(r"(?<!\\)\$|\\[()\[\]]", "", text)  # the delimiters of math mode
    text = re.sub(r"\d(?:,\\!|\{,\}|\\[,;:!]|\\ |,\\ )\s*(?=\d{3}(?!\d))", lambda m: m.group()[0], text)  # 10{,}080, 10\,080
    text = _COLOR.sub("", re.sub(r"\\[,;: ]|~", " ", text.replace("\\!", "")))
    if _ENVIRONMENT.search(text) and "matrix" not in text and "array" not in text:
        text = _ENVIRONMENT.sub("", text).replace("&", " ")
    text = _notations(text)
    text = _REPEATING.sub(_repeating, text)
    text = re.sub(r"(?<![\d.,/])(\d+) (\d+)/(\d+)(?![\d.])", r"\1\\frac{\2}{\3}", text)  # 7 1/2
    text = _COMMAND.sub(lambda m: _RENAMED.get(m[1], m.group()), text)
    text = _mark_text(text)
    text = re.sub(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\circ|\\degree)", r"\\degree ", text)
    text = re.sub(
        rf"(?<=[\d}}) ])\^\s*(?:o(?![A-Za-z])|\{{\s*o\s*\}}|\{{\s*{TEXT_OPEN}\s*o\s*{TEXT_CLOSE}\s*\}})", r"\\degree ", text
    )
    text = text.rpartition("\\implies")[2] if re.search(r"\\implies\s*\S", text) else text  # what follows is the conclusion
    text = re.sub(r"\^\s*\{\s*('(?:\s*')*)\s*\}|\^\s*('+)", lambda m: (m.group(1) or m.group(2)).replace(" ", ""), text)
    text = _DERIVATIVE.sub(_primed, text)
    return re.sub(r"\s+", " ", text).strip()


def _notations(text: str) -> str:
    """Writes plain-text and regional spellings as LaTeX: powers of ten, functions, plus-minus, unions, derivatives."""
    text = re.sub(r"(?<=\d)\s*(?:[xX]|\\(?:text|mathrm)\s*\{\s*[xX]\s*\})\s*(?=10\s*\^)", r" \\times ", text)
    text = _FUNCTION_NAME.sub(lambda m: f"\\{m[1] or m[2]} ", text)
    text = re.sub(r"\+\s*/\s*-", r"\\pm ", text)
    text = re.sub(r"(?<=[)\]}])\s*U\s*(?=[(\[{\\])", r"\\cup ", text)
    text = re.sub(r"(?<=[)\]}])\s*-\s*(?=\\\{)", r"\\setminus ", text)
    text = re.sub(r"(?<![A-Za-z\\])inf(?:ty|inity)?(?![A-Za-z])", r"\\infty ", text)
    text = re.sub(r"(?<![A-Za-z\\])d([A-Za-z])\s*/\s*d([A-Za-z])(?![A-Za-z])", r"\\frac{d\1}{d\2}", text)
    return re.sub(r"\\(d?dot)\s*(?:\{\s*([A-Za-z])\s*\}|\s([A-Za-z]))(?!\s*_)", _dots_as_primes, text)


def _dots_as_primes(match: re.Match) -> str:
    return (match[2] or match[3]) + {"dot": "'", "ddot": "''"}[match[1]]


def clean_lines(text: str) -> str:
    """Returns running text in ASCII, line by line: without invisible characters, emphasis, dollar signs and thin spaces."""
    text = "\n".join(_ascii(line) for line in squeezed(text).split("\n"))
    text = re.sub(r"\{,\}|,\\!", ",", text)
    return re.sub(r"\\?\$|\*\*|\\[,;!]", "", text)


def _repeating(match: re.Match) -> str:
    """Writes a repeating decimal as a fraction: 0.1\\overline{6} is (16 - 1) / 90."""
    whole, fixed, *marked = match.groups(default="")
    repeated = "".join(marked)
    top = int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed)
    return f"\\frac{{{top}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}" if len(match.group()) < 200 else match.group()


def _primed(match: re.Match) -> str:
    """Writes a derivative with primes; a variable other than time or x is kept as an index."""
    order, function, argument, variable = match.groups()
    return function + ("" if variable in "tx" else f"_{{{variable}}}") + "'" * int(order or 1) + (argument or "")


def _ascii(raw: str) -> str:
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", raw)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m.group()) + "}", text)
    return "".join(char if " " <= char < "\x7f" else _plain(char) for char in text)


@functools.cache
def _plain(char: str) -> str:
    """Returns ASCII for one character: fractions, full-width and mathematical letters, Greek. Invisible characters vanish."""
    if char in _UNICODE or char in "\t\n\r":
        return _UNICODE.get(char, " ")
    if unicodedata.category(char) in ("Cf", "Cc", "Mn"):
        return ""
    name = unicodedata.name(char, "")
    plain = unicodedata.normalize("NFKC", char)
    if name.startswith("VULGAR FRACTION") and "\u2044" in plain:
        top, bottom = plain.split("\u2044")
        return f"\\frac{{{top}}}{{{bottom}}}"
    if name.startswith(("GREEK SMALL LETTER ", "GREEK CAPITAL LETTER ")):
        letter = name.split()[3].lower().replace("lamda", "lambda")
        return "\\" + (letter.capitalize() if "CAPITAL" in name else letter) + " "
    return " " if plain.isspace() else "".join(_UNICODE.get(c, c) for c in plain)


def _mark_text(text: str) -> str:
    """Turns each text group, with those nested in it, into one marked run."""
    for _ in range(MAX_RAW // 7):  # as many as fit
        text, count = _TEXT_GROUP.subn(rf"{TEXT_OPEN}\1{TEXT_CLOSE}", text)
        if not count:
            break
        while (merged := _INNER_GROUP.sub(rf"{TEXT_OPEN}\1\2", text)) != text:
            text = merged
    text = re.sub(rf"{TEXT_OPEN}\s*([ied])\s*{TEXT_CLOSE}", r"\1", text)  # upright constants
    return re.sub(rf"{TEXT_CLOSE}\s*{TEXT_OPEN}", " ", text)


def unmarked(text: str) -> str:
    """Returns clean text with the marks of prose taken off: words become runs of letters."""
    return text.replace(TEXT_OPEN, " ").replace(TEXT_CLOSE, " ").strip()


def canonical(text: str) -> str:
    """Returns clean text without white space, marks and the braces around single characters; equal means surely the same."""
    text = re.sub(rf"[\s{TEXT_OPEN}{TEXT_CLOSE}]", "", text)
    return re.sub(r"\{([^{}\\])\}", r"\1", text)


#### Units of measure, money and percent at the end (or, for money, at the start) of an answer

_SPELLINGS = """inch inches in; foot feet ft; yard yards yd; mile miles mi; millimeter millimeters millimetre millimetres mm;
    centimeter centimeters centimetre centimetres cm; meter meters metre metres m; kilometer kilometers kilometre kilometres km;
    gram grams g; kilogram kilograms kg; pound pounds lb lbs; ounce ounces oz; liter liters litre litres l;
    milliliter milliliters ml; second seconds sec secs s; minute minutes min mins; hour hours hr hrs h; day days; week weeks;
    month months; year years yr yrs; dollar dollars usd; cent cents; percent; degree degrees deg; celsius c; fahrenheit f;
    kelvin k; hertz hz; khz; mhz; ghz; ev; kev; mev; angstrom angstroms; nm; pc; kpc; mpc; mph; mol; rad; steradians;
    arcmin; arcsec"""
UNITS = {spelling: line.split()[0] for line in _SPELLINGS.split(";") for spelling in line.split()}  # canonical name by spelling
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_WORDS = "|".join(sorted((s for s in (*UNITS, *_SCALES) if len(s) > 3), key=len, reverse=True))
# Unmarked letters after a number are a unit only if they are a word or a known abbreviation of two letters or more.
_ABBREVIATIONS = "cm|mm|km|kg|ft|Hz|kHz|MHz|GHz|eV|keV|MeV|nm|pc|kpc"
_PLAIN_UNIT = re.compile(rf"(?<=[\d}}) ])((?i:(?:square |cubic )?(?:{_WORDS})\b)|(?:{_ABBREVIATIONS})\b)")
_PLAIN_WORDS = re.compile(r"^(\\?\$?-?[\d.,/ ]*\d)\s+([A-Za-z][A-Za-z ]{2,})$")
_TRAILING = re.compile(
    rf"^(?P<body>.*[^\s,])[\s,]*{TEXT_OPEN}(?P<unit>[^{TEXT_CLOSE}]*){TEXT_CLOSE}\s*(?:\^\s*\{{?\s*(?P<power>\d)\s*\}}?)?$",
    re.DOTALL,
)
_ARC = re.compile(r"^(\d+)\s*\\degree\s*(\d+)'(?!')\s*(?:(\d+)'')?$")  # degrees, minutes and seconds
_SOLAR = re.compile(r"^([-\d.]+(?:\s*\\(?:times|cdot)\s*10\s*\^\s*\{?-?\d+\}?|e-?\d+)?)\s*([MLR])_\{?\s*\\odot\s*\}?$")
_DEGREE = re.compile(rf"^(?P<body>.*\S)\s*\\degree\s*{TEXT_OPEN}?\s*(?P<scale>[CFK]?)\s*{TEXT_CLOSE}?$", re.DOTALL)

_PARTS = {  # what one of a unit is made of
    **{"hour": ("minute", 60), "minute": ("second", 60), "day": ("hour", 24), "week": ("day", 7), "year": ("month", 12)},
    **{"foot": ("inch", 12), "pound": ("ounce", 16), "dollar": ("cent", 100)},
}
COMPOUND = re.compile(  # 3 hours and 30 minutes
    r"(?<![\d.,^])(\d{1,9}(?:\.\d{1,9})?)\s?([A-Za-z]{1,8})\.?,?\s{1,3}(?:and\s)?\s?(\d{1,9}(?:\.\d{1,9})?)\s?([A-Za-z]{1,8})\b"
)


def compound(match: re.Match) -> dict[str, Fraction]:
    """Returns the value of a COMPOUND by unit, the larger and the smaller; empty if the one is no part of the other."""
    large, small = (UNITS.get(match[i].lower(), "") for i in (2, 4))
    part, size = _PARTS.get(large, ("", 1))
    total = Fraction(match[1]) * size + Fraction(match[3])
    return {small: total, large: total / size} if part == small else {}


@dataclasses.dataclass(frozen=True)
class Quantity:
    """An answer taken apart. `unit` is None if there is none or it isn't known; unknown words are ignored, not compared."""

    body: str
    unit: tuple[str, ...] | None = None
    percent: bool = False
    scale: int = 1


def quantity(text: str) -> Quantity:
    """Splits clean text into its number or expression and what it is measured in."""
    text = _ARC.sub(r"(\1+\2/60+0\3/3600)\\degree", text)
    text = _SOLAR.sub(rf"\1 {TEXT_OPEN}solar \2{TEXT_CLOSE}", text)
    if TEXT_OPEN not in text:
        mark = rf"{TEXT_OPEN}\1{TEXT_CLOSE}"
        text = _PLAIN_WORDS.sub(rf"\1 {TEXT_OPEN}\2{TEXT_CLOSE}", _PLAIN_UNIT.sub(mark, text))
    unit: tuple[str, ...] | None = None
    text = re.sub(r"^(-?[\d.,]+)\s*\\\$$", r"\\$\1", text)  # 36\$
    if money := re.match(r"(-?)\s*\\\$\s*(-?)", text):
        text, unit = money.group(1) + money.group(2) + text[money.end() :], ("dollar",)
    scale = 1
    for _ in range(3):  # \text{square }\text{inches}, 5 million dollars
        if match := _DEGREE.match(text):
            text, unit = match["body"], ({"C": "celsius", "F": "fahrenheit", "K": "kelvin"}.get(match["scale"], "degree"),)
        elif match := _TRAILING.match(text):
            words = [word for word in re.findall(r"[a-z]+", match["unit"].lower().replace(".", ""))]
            for word in words:
                scale *= _SCALES.get(word, 1)
            named = _canonical(words, match["power"])
            text = match["body"]
            unit = (*unit, *named) if unit and named and named[0] == "per" else named or unit
        else:
            break
    if arc := re.search(r"(?<=[\d}])'{1,2}$", text):
        text, unit = text[: arc.start()], (arc.group(),)
    percent = re.fullmatch(r"(.*[^\s\\])\s*\\?%", text, re.DOTALL)
    percent_word = unit == ("percent",)
    return Quantity(percent.group(1) if percent else text, None if percent_word else unit, bool(percent) or percent_word, scale)


def _canonical(words: list[str], power: str | None) -> tuple[str, ...] | None:
    """Returns known unit words in a canonical order of their own, or None if one of them isn't known."""
    words = [word for word in words if word not in _SCALES]
    if words[1:] and words[0] in ("degree", "degrees") and words[1] in ("celsius", "fahrenheit", "kelvin", "c", "f", "k"):
        words = words[1:]
    power = power or next((_POWERS[word] for word in words if word in _POWERS), None)
    names = [UNITS.get(word, "per" if word in ("per", "a", "an") else "") for word in words if word not in _POWERS]
    if not names or not all(names):
        return None
    return (*names, power) if power else tuple(names)
