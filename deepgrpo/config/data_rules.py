"""Whether the names of data sets can stand for any: their form alone, files are looked for later (inputs.py)."""

import difflib
import re
from collections.abc import Sequence

from ml_collections import config_dict

GENERATED = {  # data sets that come from a generator, not from a file: what follows their name
    "carry_chain": (r"(train|heldout):0*[1-9]\d*", "SPLIT:COUNT"),
    "arithmetic": (r"(train|heldout):0*[1-9]\d*(:[1-3])?", "SPLIT:COUNT or SPLIT:COUNT:DIGITS, DIGITS 1 to 3"),
}


def problems(data: config_dict.ConfigDict, readers: Sequence[str]) -> list[str]:
    """One for each key that holds a name which stands for no data set; an empty tuple is not judged here."""
    found = []
    for key in ("train", "validation", "selection"):
        wrong = [text for name in data[key] if (text := problem(name, readers))]
        if wrong:
            found.append(f"data.{key} = {data[key]!r}: {'; '.join(wrong)}")
    return found


def problem(name: str, readers: Sequence[str]) -> str:
    """What is wrong with one "NAME:PATH", or ""."""
    reader, _, rest = name.partition(":")
    if reader not in readers:
        near = difflib.get_close_matches(reader, readers, n=1)
        hint = f"{name} is none; did you mean {near[0]}?" if near else f"{name} is none."
        return f"expected NAME:PATH with NAME one of {', '.join(readers)}; {hint}"
    if reader in GENERATED:
        pattern, shape = GENERATED[reader]
        if not re.fullmatch(pattern, rest):
            return f"{name}: expected {reader}:{shape}, SPLIT train or heldout and COUNT above 0"
    elif not rest:
        return f"{name}: expected {reader}:PATH, PATH a file or folder"
    return ""
