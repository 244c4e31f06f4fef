"""From a command line to a configuration that is known to be whole, well typed and possible.

`configs/common.py` is the schema. An experiment may edit its keys but add none, and overrides may edit the experiment's.
"""

import ast
import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from ml_collections import config_dict

from deepgrpo.config import constraints, knobs
from deepgrpo.config.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "configs" / "common.py"

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
KINDS = {bool: "a truth value (true or false)", int: "a whole number", float: "a number", str: "text", tuple: "a tuple"}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What the user typed. file: the experiment's path. argument: what followed its colon, if anything did.

    overrides: (key, text) pairs in the order given.
    """

    argv: tuple[str, ...]
    file: str
    argument: str | None
    overrides: tuple[tuple[str, str], ...]


def from_command_line(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[config_dict.ConfigDict, CommandLine]:
    """Returns the locked configuration that `argv` (as `sys.argv`: the program's name first) asks for.

    others: flags and words that the program takes besides (and has taken out of `argv`), so that a mistyped one is recognised.

    Raises:
      ConfigError: unknown flag, key or section, wrong type, duplicate, missing required key or impossible combination.
      SystemExit: --help was asked for, and printed.
    """
    line = split_command_line(argv, others)
    schema = load(SCHEMA, None)
    config = load(pathlib.Path(line.file), line.argument)
    problems = against_schema(config, schema, line.file)
    experiments_model = flatten(config).get("model.path")
    for key, text in line.overrides:
        override(config, schema, key, text, problems)
    stop_at(problems, f"{line.file}, with the overrides of the command line")
    if config.model.path != experiments_model and "model.origin" not in dict(line.overrides):
        config.model.origin = ""  # says how to get the experiment's model, which another folder is not for
    missing = [key for key, value in flatten(config).items() if value is None]
    stop_at([f"{key} is required: set it in {line.file} or add --config.{key}=VALUE" for key in missing], line.file)
    config = config.copy_and_resolve_references()
    validate(config)
    for warning in knobs.warnings(os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    return config.lock(), line


def validate(config: config_dict.ConfigDict) -> None:
    """Raises one ConfigError with every value out of its range and every combination that cannot work."""
    stop_at(constraints.problems(config, flatten(config)), "values")


def flatten(config: config_dict.ConfigDict) -> dict[str, Any]:
    """Returns {dotted key: value} of all leaves, in the order of definition; a placeholder's value is None."""
    flat = {}
    for name in config.keys():
        value = config[name]
        if isinstance(value, config_dict.ConfigDict):
            flat |= {f"{name}.{key}": leaf for key, leaf in flatten(value).items()}
        else:
            flat[name] = value
    return flat


#### The command line


def split_command_line(argv: Sequence[str], others: Sequence[str] = ()) -> CommandLine:
    """Sorts the arguments into the experiment and its overrides; refuses everything else."""
    file, overrides = None, {}
    rest = list(argv[1:])
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        if flag in ("--help", "-h"):
            with contextlib.suppress(BrokenPipeError):  # `--help | head` has seen enough
                print(usage(pathlib.Path(argv[0]).stem), flush=True)
            raise SystemExit(0)
        if flag != "--config" and not flag.startswith("--config."):
            unknown_flag(flag, others)
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} has no value: write {flag}=VALUE")
            text = rest.pop(0)
        if flag == "--config":
            if file is not None:
                raise ConfigError(f"--config is given twice: {file} and {text}. Keep one")
            file = text
            continue
        key = flag.removeprefix("--config.")
        if key in overrides:
            raise ConfigError(f"--config.{key} is given twice: {overrides[key]} and {text}. Keep one")
        overrides[key] = text
    if not file:
        raise ConfigError(f"no configuration: add --config=PATH, for instance one of {', '.join(experiments())}")
    # The argument starts at the colon after ".py", so that a path may hold colons of its own.
    path, suffix, argument = file.partition(".py:")
    return CommandLine(tuple(argv), path + ".py" if suffix else file, argument if suffix else None, tuple(overrides.items()))


def unknown_flag(flag: str, others: Sequence[str]) -> NoReturn:
    if re.search(r"\.py(:|$)", flag) and not flag.startswith("-"):
        raise ConfigError(f"unknown argument {flag}: did you mean --config={flag}?")
    keys = list(flatten(load(SCHEMA, None)))
    bare = flag.lstrip("-").removeprefix("no").removeprefix("config.")
    same = difflib.get_close_matches(flag, ["--config", "--help", *others], cutoff=0.75)
    near = same or [f"--config.{key}=VALUE" for key in nearest(bare, keys)[:1] if flag.startswith("-")]
    hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(['--config=PATH', '--config.KEY=VALUE', *others])}"
    raise ConfigError(f"unknown argument {flag}: {hint}")


def experiments() -> list[str]:
    """Paths of the experiments that come with the code, for messages."""
    return sorted(f"configs/{path.name}" for path in SCHEMA.parent.glob("*.py") if path != SCHEMA)


def usage(program: str) -> str:
    """What an entry point says about itself, then every key with its default and comment, read from the schema's own lines."""
    source = ROOT / "deepgrpo" / f"{program}.py"
    about = ast.get_docstring(ast.parse(source.read_text())) if source.is_file() else None
    lines = [
        f"usage: python -m deepgrpo.{program if about else 'PROGRAM'} --config=PATH.py[:ARGUMENT] [--config.KEY=VALUE ...]",
        *(["", about] if about else []),
        "",
        f"PATH.py: {', '.join(experiments())}",
        "",
        "keys (their defaults here are those of configs/common.py; an experiment may set others):",
    ]
    key_line = r"^ +config\.([\w.]+) = (?!section)(?:\(\n +)?([^#\n]+?)(?:  # (.*))?$"  # a long line is wrapped in brackets
    for match in re.finditer(key_line, SCHEMA.read_text(), re.M):
        key, default, comment = match.groups()
        default = "(required)" if "placeholder" in default else default
        lines.append(f"  --config.{key}={default}" + (f"\n      {comment}" if comment else ""))
    return "\n".join(lines)


#### Experiment files


def load(path: pathlib.Path, argument: str | None) -> config_dict.ConfigDict:
    """Runs `get_config` of a configuration file."""
    if not path.is_file():
        near = difflib.get_close_matches(str(path), experiments(), n=2, cutoff=0.4) or experiments()
        raise ConfigError(f"configuration file {path} does not exist (looked from {os.getcwd()}); nearest: {', '.join(near)}")
    if str(ROOT) not in sys.path:  # experiments say `from configs import common`, wherever they are started from
        sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        get_config = module.get_config
        if argument is not None and not inspect.signature(get_config).parameters:
            raise ConfigError(f"{path} takes no argument, found :{argument}. Leave it out")
        return get_config() if argument is None else get_config(argument)
    except Exception as error:  # whatever an experiment's code raises is the user's to mend: say where
        raise ConfigError(f"{path} failed{where(path, error)}: {type(error).__name__}: {error}") from error


def where(path: pathlib.Path, error: Exception) -> str:
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) or not lines:
        return f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
    number = lines[-1].lineno
    return f" at line {number} `{path.read_text().splitlines()[number - 1].strip()}`"


def against_schema(config: config_dict.ConfigDict, schema: config_dict.ConfigDict, file: str) -> list[str]:
    """Problems of an experiment's keys and types: an unlocked ConfigDict takes any new key without a word."""
    found, expected = flatten(config), flatten(schema)
    source = pathlib.Path(file).read_text().splitlines()
    problems = []
    for key, value in found.items():
        if key not in expected:
            leaf = key.rpartition(".")[2]
            numbers = [i for i, text in enumerate(source, 1) if re.search(rf"\b{re.escape(leaf)}\b", text)]
            problems.append(unknown_key(key, list(expected), f"{file}:{numbers[0]}" if numbers else file))
        elif wrong := mismatch(value, key, schema):
            problems.append(f"{file}: {wrong}")
    problems += [
        f"{file}: key {key} is gone; edit the sections of configs/common.py in place" for key in expected if key not in found
    ]
    return problems


#### Keys, types and values


def nearest(key: str, keys: Sequence[str]) -> list[str]:
    """Up to three existing keys that `key` may stand for: the same leaf in another section first, then similar spelling."""
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    leaves = {k.rpartition(".")[2]: k for k in reversed(keys)}
    similar = difflib.get_close_matches(key, keys, n=2, cutoff=0.7)
    similar_leaf = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)]
    return list(dict.fromkeys(same_leaf + similar + similar_leaf))[:3]


def unknown_key(key: str, keys: Sequence[str], origin: str) -> str:
    near = nearest(key, keys)
    hint = f"did you mean {' or '.join(near)}?" if near else "no key has a similar name; configs/common.py lists all"
    return f"{origin}: unknown key {key}; {hint}"


def kind_of(key: str, schema: config_dict.ConfigDict) -> tuple[type, type]:
    """Returns (type of a key, type of its elements), by its default; an empty tuple's elements are text."""
    section, _, leaf = key.rpartition(".")
    holder = schema
    for name in section.split(".") if section else ():
        holder = holder[name]
    default = holder[leaf]
    if default is None:
        return holder.get_type(leaf), str
    return type(default), type(default[0]) if isinstance(default, tuple) and default else str


def mismatch(value: Any, key: str, schema: config_dict.ConfigDict) -> str:
    """Returns what is wrong with a value's type, or "". None passes: it is a placeholder that was not set yet."""
    kind, element = kind_of(key, schema)
    if value is not None and type(value) is not kind:
        return f"{key} = {value!r} is {KINDS.get(type(value), type(value).__name__)}, expected {KINDS[kind]}"
    if kind is tuple and value and any(type(item) is not element for item in value):
        return f"{key} = {value!r}: expected a tuple of elements that are each {KINDS[element]}"
    return ""


def override(config: config_dict.ConfigDict, schema: config_dict.ConfigDict, key: str, text: str, problems: list[str]) -> None:
    """Sets one key from the command line, or adds to `problems` why not."""
    keys = list(flatten(schema))
    if key not in keys:
        inside = [k for k in keys if k.startswith(key + ".")]
        if inside:
            problems.append(f"--config.{key} is a section, not a key; its keys: {', '.join(inside)}")
        else:
            problems.append(unknown_key(key, keys, "command line"))
        return
    kind, element = kind_of(key, schema)
    try:
        value = parse(text, kind, element)
    except ValueError:
        of = f" of elements that are each {KINDS[element]}" if kind is tuple else ""
        problems.append(f"--config.{key}={text}: expected {KINDS[kind]}{of}, found {text!r}")
        return
    section, _, leaf = key.rpartition(".")
    holder = config
    for name in section.split(".") if section else ():
        holder = holder[name]
    holder[leaf] = value


def parse(text: str, kind: type, element: type) -> Any:
    """Reads a value of a type from the command line's text; raises ValueError when it is none.

    A tuple is written as Python would, `(1,-1,1)`, or plainly, `1,-1,1`; a one-element tuple needs no comma.
    """
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise ValueError(text)
        return text.lower() in TRUE
    if kind is int:
        return int(text)
    if kind is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(text)
        return value
    if kind is str:
        if text == "None":  # a text key is never None: this is a misunderstanding, '' is what switches one off
            raise ValueError(text)
        return text
    inner = text.strip()
    if inner[:1] in ("(", "[") and inner[-1:] in (")", "]"):
        try:
            return tuple(parse(str(item), element, str) for item in ast.literal_eval(inner))
        except (SyntaxError, TypeError, ValueError):
            inner = inner[1:-1]  # (gsm8k:train.jsonl, math:train.jsonl): names without quotes
    return tuple(parse(item.strip(), element, str) for item in inner.split(",") if item.strip())


def stop_at(problems: Sequence[str], origin: str) -> None:
    """Raises one error that holds all problems, if there are any."""
    if problems:
        plural = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise ConfigError("\n  ".join([f"configuration error ({origin}): {plural}", *problems]))
