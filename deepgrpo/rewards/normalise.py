"""One spelling for final answers that are words, numbers or dates, shared by the graders of search and table sources.

`same` compares by type: two dates as dates, two amounts as numbers with their units, everything else as words (case, accents,
punctuation and articles don't matter; a sign, a decimal point and a range do). Exact arithmetic throughout.
"""

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from deepgrpo.rewards import latex

MAX_CHARS = 2_000  # of a final answer; no key of these sources comes near
MAX_AMOUNT = 120  # characters of a number with its unit
MAX_ITEMS = 200  # of a list

#### Characters

_LETTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63", "-"),
        **dict.fromkeys("\u2018\u2019\u02bc\u00b4`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
        **{"\u2044": "/", "\u00d7": "x", "\u00b7": "*", "\u00f8": "o", "\u0142": "l", "\u0111": "d", "\u0131": "i"},
        **{"\u00e6": "ae", "\u0153": "oe", "\u00f0": "d", "\u00fe": "th"},
    }
)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b]+")
_VULGAR_FRACTION = re.compile("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e])")


def fold(text: str) -> str:
    """Returns `text` in lower case with plain letters, digits, dashes and spaces. Accents go; the marks of other scripts stay."""
    text = _VULGAR_FRACTION.sub(" ", _SUPERSCRIPTS.sub(lambda run: "^" + run.group(), text))
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    kept = (
        char for char in text if not "\u0300" <= char <= "\u036f" and (char.isspace() or unicodedata.category(char)[0] != "C")
    )
    return " ".join("".join(kept).translate(_LETTERS).split())


#### Dates

_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = r"(?P<month>" + "|".join(f"{name}|{name[:3]}\\.?" for name in _MONTHS) + r"|sept\.?)"
_DAY = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>\d{4})"
_WEEKDAY = r"(?:\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\.?,? )?"
_DATES = [
    re.compile(pattern)
    for pattern in (
        rf"{_WEEKDAY}(?<![\w.,/-]){_DAY}(?: of |[ -]){_MONTH}(?:(?:,? |-){_YEAR})?(?!\w)",
        rf"{_WEEKDAY}\b{_MONTH} {_DAY}(?:,? {_YEAR})?(?!\w)",
        rf"(?<![\w.,/-]){_YEAR}(?:,? |-){_MONTH}[ -]{_DAY}(?!\w)",
        rf"(?<![\w.,/-]){_YEAR}(?P<gap>[-/.])(?P<month>\d{{1,2}})(?P=gap){_DAY}(?:[t ]00:00(?::00)?)?(?![\w/-])",
        r"(?<![\w.,/-])(?P<first>\d{1,2})(?P<gap>[-/.])(?P<second>\d{1,2})(?P=gap)(?P<year>\d{4})(?![\w/-])",
        rf"\b{_MONTH},? {_YEAR}(?!\w)",
    )
]


def with_iso_dates(folded: str) -> str:
    """Returns folded text with its dates as year-month-day; a missing year is 0000, a missing day is left out.

    Numeric dates that could be read day first and month first stay as they are.
    """
    for pattern in _DATES:
        folded = pattern.sub(_iso, folded)
    return folded


def _iso(match: re.Match) -> str:
    parts = match.groupdict()
    if first := parts.get("first"):
        day, month = int(first), int(parts["second"])
        if parts["gap"] != ".":
            if day <= 12 and month <= 12 and day != month:
                return match.group()
            day, month = max(day, month), min(day, month)
    else:
        name, day = parts["month"], int(parts.get("day") or 0)
        month = int(name) if name.isdigit() else 1 + next(i for i, full in enumerate(_MONTHS) if full.startswith(name[:3]))
    if not 1 <= month <= 12 or not 0 <= day <= 31:
        return match.group()
    return f"{int(parts.get('year') or 0):04d}-{month:02d}" + (f"-{day:02d}" if day else "")


#### Words

_ARTICLES = frozenset(("a", "an", "the"))
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_MEANS_SOMETHING = re.compile(r"(?<=\d)[^\w\s](?=\d)|(?<![\w).])-(?=\.?\d)|(?<![\w.])\.(?=\d)|(?<=[a-z])[+#]{1,2}(?!\w)")
_PUNCTUATION = re.compile(r"[^\w\s]|_")


@functools.lru_cache(maxsize=4096)
def words(text: str) -> frozenset[str]:
    """Returns the spellings of `text` without case, accents, punctuation and articles: two texts say the same if they share one.

    There are two: punctuation inside words deleted (U.S. = US) and as a space (Jean-Luc = Jean Luc). Between digits, and as a
    sign, punctuation means something and stays. An article that ends the text is a name (Serie A) and stays too.
    """
    folded = _THOUSANDS.sub("", with_iso_dates(fold(text)))
    folded = re.sub(r"(?<=\d) ?- ?(?=\d)", "-", folded).replace("%", " percent ").replace("&", " and ")
    kept = {at for match in _MEANS_SOMETHING.finditer(folded) for at in range(*match.span())}
    kept |= {at for at, char in enumerate(folded) if unicodedata.category(char)[0] == "M"}  # vowel signs, which `\w` leaves out
    spellings = set()
    for gap in ("", " "):
        plain = _PUNCTUATION.sub(lambda m, gap=gap: m[0] if m.start() in kept else gap, folded).split()
        spellings.add(" ".join(w for i, w in enumerate(plain) if w not in _ARTICLES or i == len(plain) - 1) or folded)
    return frozenset(spellings)


#### Amounts


def _named(text: str) -> dict[str, str]:
    """Reads lists of spellings, separated by ";", as the first of a list by each."""
    return {spelling: line.split()[0] for line in text.split(";") for spelling in line.split()}


_CURRENCIES = _named("dollar dollars $ us$ usd; euro euros \u20ac eur; pound \u00a3 gbp; yen \u00a5 jpy; rupee rupees \u20b9 inr")
_UNITS = {s: name for s, name in latex.UNITS.items() if len(s) > 1 and name not in ("pound", "dollar", "cent")} | _named(
    """decade decades; century centuries; meter m; ton tons tonne tonnes t; percent % percentage pct; page pages;
    point points pt pts; kilometer/hour km/h kmh kph kmph kilometers/hour kilometres/hour km/hour;
    mile/hour mph mi/h miles/hour"""
)
_NAMES = _CURRENCIES | _UNITS
_DURATIONS = {  # exact relations only: a month has no fixed number of days
    **{"second": ("day", Fraction(1, 86400)), "minute": ("day", Fraction(1, 1440)), "hour": ("day", Fraction(1, 24))},
    **{"week": ("day", Fraction(7)), "year": ("month", Fraction(12))},
    **{"decade": ("month", Fraction(120)), "century": ("month", Fraction(1200))},
}
_SCALES = {"thousand": 3, "k": 3, "million": 6, "mn": 6, "m": 6, "billion": 9, "bn": 9, "b": 9, "trillion": 12}
_COUNTS = {word: str(n) for n, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())}
_MONEY = r"(?:us ?\$|[$\u20ac\u00a3\u00a5\u20b9]|(?:usd|eur|gbp) )"
_AMOUNT = re.compile(
    rf"(?P<open>\( ?)?(?P<sign>[-+] ?)?(?P<money>{_MONEY})? ?(?P<minus>- ?)?"
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d{1,60})?(?P<decimals>\.\d{1,60})?"
    r"(?:(?:e| ?[x*] ?10 ?\^ ?)(?P<exponent>[-+]?\d{1,2}))?(?: ?/ ?(?P<below>[1-9]\d{0,30}))?"
    r"(?: ?(?P<scale>thousand|million|billion|trillion|mn|bn|[kmb])(?![a-z]))?(?P<close> ?\))?"
    r" ?(?P<unit>[a-z%\u20ac$\u00b0][a-z/.^%$ \u00b0]*(?:\^?[23])?)?"
)
_ABOUT = re.compile(r"^(?:approximately |approx\.? |about |around |roughly |[~\u2248=] ?)")
_NOT_UNITS = frozenset("or and not to than of out bc ad bce ce x times vs versus minus plus".split())


@dataclasses.dataclass(frozen=True)
class Amount:
    """A number as it was written.

    value: with its scale word, without the division by 100 of a percentage.
    quantum: what one unit in the last written digit is worth, in the same terms as `value`.
    measured: decimals are written, or it is a percentage: then it may be a rounded number.
    scale: power of ten of its scale word ("million": 6).
    unit: canonical name, "percent" among them; "" if there is none.
    """

    value: Fraction
    quantum: Fraction
    measured: bool
    scale: int
    unit: str

    @property
    def percent(self) -> bool:
        return self.unit == "percent"

    def times(self, factor: Fraction, unit: str = "") -> "Amount":
        return dataclasses.replace(self, value=self.value * factor, quantum=self.quantum * factor, unit=unit or self.unit)


@functools.lru_cache(maxsize=4096)
def amount(text: str, accounting: bool = False) -> Amount | None:
    """Returns the number, with its unit, that `text` consists of; None if it says anything else.

    accounting: as in financial reports: parentheses around a number mean that it's negative, and it may be called approximate.
    """
    folded = fold(text).rstrip(" .") if len(text) <= 2 * MAX_AMOUNT else ""
    folded = _ABOUT.sub("", folded) if accounting else folded
    match = _AMOUNT.fullmatch(_COUNTS.get(folded, folded)) if len(folded) <= MAX_AMOUNT else None
    if match is None or not (match["digits"] or match["decimals"]) or (match["sign"] and match["minus"]):
        return None
    part = match.groupdict(default="")
    digits, decimals, scale = re.sub("[, ]", "", part["digits"]), part["decimals"], part["scale"]
    if bool(part["open"]) != bool(part["close"]) or re.match("0.", digits) and not decimals:  # 007 is a name
        return None
    units = {_unit(part["unit"]), _NAMES.get(part["money"].replace(" ", ""), "")}
    if len(scale) == 1 and not part["money"]:
        units, scale = units | {_NAMES.get(scale, scale)}, ""  # 5 m are meters, $5m are millions
    if None in units or len(units - {""}) > 1:
        return None
    unit = max(units)
    power = Fraction(10) ** (int(part["exponent"] or 0) + _SCALES.get(scale, 0)) / int(part["below"] or 1)
    value = Fraction((digits or "0") + decimals) * power
    negative = "-" in part["sign"] + part["minus"] or accounting and part["open"]
    quantum = power / 10 ** max(0, len(decimals) - 1)
    return Amount(-value if negative else value, quantum, bool(decimals) or unit == "percent", _SCALES.get(scale, 0), unit)


def _unit(text: str) -> str | None:
    """Returns a unit's name, or the words of an unknown unit; None if the text qualifies the number and does not measure it."""
    if _NOT_UNITS & set(re.findall("[a-z]+", text)):
        return None
    plain = re.sub(r" ?(?:/| per ) ?", "/", text.replace("per cent", "percent").replace("us dollar", "dollar")).strip(" .")
    plain = plain.replace("percentage points", "percent").replace("percentage point", "percent")
    return _NAMES.get(plain, plain.removesuffix("s") if len(plain) > 3 else plain)


#### Comparison

Close = Callable[[Amount, Amount], bool]  # of a key and an answer in the same unit


def exact(key: Amount, answer: Amount) -> bool:
    """Returns whether the numbers are equal."""
    return key.value == answer.value


def nearly(key: Amount, answer: Amount) -> bool:
    """Returns whether they differ by at most 1e-5 of the key (1e-5 if that is 0), which is what floats leave."""
    return abs(key.value - answer.value) <= Fraction(1, 10**5) * (abs(key.value) or 1)


def rounded(key: Amount, answer: Amount) -> bool:
    """Returns the more precise of the two, rounded as the other one is written, gives the other one.

    A whole key is a count: what rounds to it must also be within 0.1 %. An answer coarser than the key must be within 0.1 % too,
    or carry three significant digits.
    """
    off, permille = abs(key.value - answer.value), abs(key.value) / 1000
    if answer.quantum <= key.quantum:
        return off <= key.quantum / 2 and (key.measured or off <= permille)
    return off <= answer.quantum / 2 and (off <= permille or abs(answer.value) >= 100 * answer.quantum)


@dataclasses.dataclass(frozen=True)
class Rules:
    """How a source compares.

    close: whether two numbers agree.
    bare_units: a unit of measure may be left out, or added to a bare key.
    accounting: (3.2) is -3.2, and about 3.2 is 3.2.
    """

    close: Close = exact
    bare_units: bool = False
    accounting: bool = False


def same(key: str, answer: str, rules: Rules, question: str = "") -> bool:
    """Returns whether two answers say the same. `question` settles what a number without percent sign or scale word means."""
    if len(answer) > MAX_CHARS or not answer.strip():
        return False
    left, right = (amount(text, rules.accounting) for text in (key, answer))
    if left and right:
        return same_amount(left, right, rules, question)
    return not words(key).isdisjoint(words(answer))


def same_amount(key: Amount, answer: Amount, rules: Rules, question: str = "") -> bool:
    """Returns whether two amounts agree, in any of the ways in which their percent signs, scale words and units can be read."""
    (key_base, key_size), (base, size) = (_DURATIONS.get(a.unit, (a.unit, Fraction(1))) for a in (key, answer))
    if key.unit != answer.unit and key_base == base:
        key, answer = key.times(key_size, base), answer.times(size, base)
    if key.unit != answer.unit and not _omitted(key.unit, answer.unit, rules):
        return False
    pairs = [tuple(side.times(Fraction(1, 100 if side.percent else 1)) for side in (key, answer))]
    asked = question.casefold()
    if (key.percent and not answer.percent) or (answer.percent and not key.percent and re.search("percent|%|per cent", asked)):
        pairs.append((key, answer))
    words_of_scale = [word for word, power in _SCALES.items() if power == (key.scale or answer.scale) and len(word) > 2]
    if key.scale != answer.scale and re.search(rf"\b(?:{'|'.join(words_of_scale)})s?\b", asked):
        pairs.append(tuple(side.times(Fraction(1, 10**side.scale)) for side in (key, answer)))
    return any(rules.close(*pair) for pair in pairs)


def _omitted(key: str, answer: str, rules: Rules) -> bool:
    """Returns whether only one side has a unit, and one that may be left out: signs of money and percent always may."""
    unit = key or answer
    measure = rules.bare_units and (unit in _UNITS.values() or not key and unit.count(" ") < 2)
    return not (key and answer) and (unit == "percent" or unit in _CURRENCIES.values() or measure)


def same_list(key: str, answer: str, rules: Rules) -> bool:
    """Returns whether two lists hold the same items, in any order. Items are separated by | ; , "and" or lines."""
    for wanted in _splits(key):
        for found in _splits(answer):
            every = all(any(same(w, f, rules) for f in found) for w in wanted)
            if every and all(any(same(w, f, rules) for w in wanted) for f in found):
                return True
    return False


def _splits(text: str) -> list[list[str]]:
    """Returns the ways to read `text` as a list of two or more."""
    if "|" in text:
        patterns = [r"\|"]
    else:
        text = re.sub(r"\s*\n\s*(?:[-*]\s+)?", ";", text.strip())
        patterns = [";"] if ";" in text else [r",\s+|,(?!\d{3}(?!\d))", r",?\s+and\s+|,\s+|,(?!\d{3}(?!\d))"]
        text = text if ";" in text else with_iso_dates(fold(text))
    splits = [[item for part in re.split(pattern, text) if (item := part.strip(" \t\n[]'\"*"))] for pattern in patterns]
    return [items for items in splits if 2 <= len(items) <= MAX_ITEMS]
