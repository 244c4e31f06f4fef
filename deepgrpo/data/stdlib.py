"""Real text that every machine has: the documentation of Python's own library, as passages and as questions about it.

What is the default value of the parameter `indent` of `json.dumps`?    ->    None
"""

import functools
import importlib
import inspect
import zlib
from collections.abc import Iterator

NAME = "stdlib"  # its data_source
MODULES = tuple(
    (
        "argparse ast asyncio base64 bisect bz2 calendar codecs collections compileall configparser contextlib copy csv "
        "datetime decimal difflib dis email.utils enum filecmp fileinput fractions functools getpass glob gzip hashlib heapq "
        "hmac html http.client http.server imaplib inspect io ipaddress json linecache locale logging lzma mailbox math "
        "mimetypes multiprocessing ntpath numbers operator optparse os pathlib pdb pickle pickletools pkgutil plistlib poplib "
        "pprint profile py_compile queue quopri random re reprlib sched secrets selectors shelve shlex shutil smtplib socket "
        "socketserver sqlite3 ssl statistics string struct subprocess symtable tarfile tempfile textwrap threading timeit "
        "tokenize traceback types typing unittest urllib.parse urllib.request uuid venv warnings wave weakref webbrowser "
        "xml.dom.minidom xmlrpc.client zipapp zipfile zlib"
    ).split()
)
MAX_TEXT = 400  # characters of a docstring
SPLITS = ("train", "heldout")
HELD_OUT_SHARE = 5  # one question in so many is never trained on


@functools.cache
def functions() -> dict[str, inspect.Signature]:
    """Signatures of the documented public functions and methods, by their full names."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for key, value in sorted(vars(module).items()):
            if key.startswith("_") or getattr(value, "__module__", name) != name:
                continue
            members = {f"{name}.{key}": value}
            if inspect.isclass(value):
                own = ((k, v) for k, v in sorted(vars(value).items()) if not k.startswith("_"))
                members = {f"{name}.{key}.{k}": v for k, v in own}
            for full, member in members.items():
                if inspect.isroutine(member) and inspect.getdoc(member):
                    try:
                        found[full] = inspect.signature(member)
                    except (ValueError, TypeError):  # written in C, without one
                        continue
    return found


def passages() -> Iterator[tuple[str, str]]:
    """(title, text) of each function: its name; its signature and the beginning of its documentation."""
    for full, signature in functions().items():
        module, _, rest = full.rpartition(".")
        while module not in MODULES:
            module, _, part = module.rpartition(".")
            rest = f"{part}.{rest}"
        member = functools.reduce(getattr, rest.split("."), importlib.import_module(module))
        yield full, f"{rest}{signature} {' '.join(inspect.getdoc(member).split())[:MAX_TEXT]}"


def problems(split: str, count: int) -> list[dict[str, str]]:
    """The first `count` questions of a split about a parameter's default, in an order that looks random and is the same for all.

    Returns:
      Rows with `question`, `answer` and `data_source`.

    Raises:
      ValueError: unknown split, or there are not so many questions.
    """
    if split not in SPLITS:
        raise ValueError(f"split of {NAME} must be one of {SPLITS}, got {split!r}")
    rows = []
    for full, signature in functions().items():
        for name, parameter in signature.parameters.items():
            if isinstance(parameter.default, int | str | float | None):
                question = f"What is the default value of the parameter `{name}` of `{full}`?"
                if (zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0) == (split == "heldout"):
                    rows.append({"question": question, "answer": str(parameter.default) or "''", "data_source": NAME})
    rows.sort(key=lambda row: zlib.crc32(row["question"].encode()))
    if count > len(rows):
        raise ValueError(f"{NAME}: the {split} split has only {len(rows)} questions, {count} were asked for")
    return rows[:count]
