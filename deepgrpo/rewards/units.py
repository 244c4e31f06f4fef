"""Units of measure, money and percent at the end (or, for money, at the start) of an answer."""

import dataclasses
import re
from fractions import Fraction

from deepgrpo.rewards.latex import TEXT_CLOSE, TEXT_OPEN

_SPELLINGS = """inch inches in; foot feet ft; yard yards yd; mile miles mi; millimeter millimeters millimetre millimetres mm;
    centimeter centimeters centimetre centimetres cm; meter meters metre metres m; kilometer kilometers kilometre kilometres km;
    gram grams g; kilogram kilograms kg; pound pounds lb lbs; ounce ounces oz; liter liters litre litres l;
    milliliter milliliters ml; second seconds sec secs s; minute minutes min mins; hour hours hr hrs h; day days; week weeks;
    month months; year years yr yrs; dollar dollars usd; cent cents; percent; degree degrees deg; celsius c; fahrenheit f;
    kelvin k; hertz hz; khz; mhz; ghz; ev; kev; mev; angstrom angstroms; nm; pc; kpc; mpc; mph; mol; rad; steradians;
    arcmin; arcsec"""
NAMES = {spelling: line.split()[0] for line in _SPELLINGS.split(";") for spelling in line.split()}  # canonical name by spelling
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3"}
_WORDS = "|".join(sorted((s for s in (*NAMES, *_SCALES) if len(s) > 3), key=len, reverse=True))
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
    """The value of a COMPOUND by unit, the larger and the smaller; empty if the one is no part of the other."""
    large, small = (NAMES.get(match[i].lower(), "") for i in (2, 4))
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
    """Known unit words in a canonical order of their own, or None if one of them isn't known."""
    words = [word for word in words if word not in _SCALES]
    if words[1:] and words[0] in ("degree", "degrees") and words[1] in ("celsius", "fahrenheit", "kelvin", "c", "f", "k"):
        words = words[1:]
    power = power or next((_POWERS[word] for word in words if word in _POWERS), None)
    names = [NAMES.get(word, "per" if word in ("per", "a", "an") else "") for word in words if word not in _POWERS]
    if not names or not all(names):
        return None
    return (*names, power) if power else tuple(names)
