"""The command line: --config=FILE.py[:ARGUMENT] and --config.KEY=VALUE, read by ml_collections' config_flags.

config_flags knows the types and refuses what it does not know. Added here are the nearest name of a mistyped key from any section
(TRL's and verl's names included), an error for a flag that is given twice, and a --help that lists the keys.
"""

import ast
import contextlib
import dataclasses
import difflib
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags
from ml_collections import config_dict, config_flags

from deepgrpo.config.errors import ConfigError
from deepgrpo.config.streams import steady

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "configs" / "common.py"
ALIASES = {  # names that TRL and verl give to our keys
    **dict.fromkeys(("num_generations", "group_size", "rollout_n"), "rollout.n"),
    **dict.fromkeys(("learning_rate", "lr"), "optim.lr"),
    **dict.fromkeys(("beta", "kl_loss_coef", "kl_coef"), "objective.kl_coef"),
    **dict.fromkeys(("epsilon", "epsilon_low", "clip_ratio", "clip_ratio_low"), "objective.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "objective.clip_high"),
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "optim.grad_clip"),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size"), "data.batch_size"),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), "optim.mini_batch_prompts"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_model_length"), "rollout.max_model_len"),
    **dict.fromkeys(("model_name_or_path", "model_name"), "model.path"),
    **dict.fromkeys(("num_train_epochs", "total_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "total_steps", "total_training_steps"), "train.steps"),
    **dict.fromkeys(("save_steps", "save_freq"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "test_freq"), "validation.every"),
    **dict.fromkeys(("dataset_name", "train_files"), "data.train"),
    **dict.fromkeys(("eval_dataset", "val_files"), "data.validation"),
    **dict.fromkeys(("run_name", "experiment_name"), "name"),
    **dict.fromkeys(("output_dir", "default_local_dir"), "run_dir"),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), "model.remat"),
    **dict.fromkeys(("tensor_model_parallel_size", "vllm_tensor_parallel_size"), "vllm.tensor_parallel"),
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "use_vllm": "rollout.engine",
    "bf16": "model.dtype",
}


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """What the user typed. file: the experiment's path. overrides: (key, text) pairs in the order given."""

    argv: tuple[str, ...]
    file: str
    overrides: tuple[tuple[str, str], ...]


def run(main: Callable[..., Any], parse: Callable[[Sequence[str]], tuple], lasting: bool = True) -> None:
    """Runs an entry point: `main(*parse(sys.argv))`; what main returns is the exit status.

    lasting: the program goes on when its terminal is gone; otherwise its output is its result.
    """

    def parse_quietly(argv: Sequence[str]) -> tuple:
        flags.FLAGS.mark_as_parsed()  # absl's own flags keep their defaults
        flags.FLAGS.verbosity = -1  # libraries may warn; what is below a warning is not the user's
        parsed = parse(argv)
        if lasting:
            steady()
        return parsed

    app.run(lambda parsed: main(*parsed), flags_parser=parse_quietly)


def read(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[config_dict.ConfigDict, CommandLine]:
    """Returns the locked configuration that `argv` (as `sys.argv`: the program's name first) asks for. Values are unchecked.

    others: flags and words that the program takes besides, and has taken out of `argv`, so that a mistyped one is recognised.

    Raises:
      ConfigError: unknown flag, key or section, wrong type, duplicate, missing required key, or an experiment that fails.
      SystemExit: --help was asked for, and printed.
    """
    if str(ROOT) not in sys.path:  # experiments say `from configs import common`, wherever they are started from
        sys.path.insert(0, str(ROOT))
    schema = flatten(load_schema())
    line = split(argv, schema, others)
    values = flags.FlagValues()
    typed = [argv[0], f"--config={line.file}", *(f"--config.{key}={quoted(text, schema[key])}" for key, text in line.overrides)]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=typed)
    path = line.file.partition(".py:")[0].removesuffix(".py") + ".py"
    if not pathlib.Path(path).is_file():
        near = ", ".join(difflib.get_close_matches(path, experiments(), n=2, cutoff=0.4) or experiments())
        raise ConfigError(f"configuration file {path} does not exist (looked from {pathlib.Path.cwd()}); nearest: {near}")
    try:
        values(typed)
        config = values.config.copy_and_resolve_references()
    except Exception as error:  # whatever an experiment's code raises is the user's to mend: say where
        if key := re.match(r"flag --config\.([\w.]+)=", str(error)):
            default = schema[key[1]]
            kind = "str" if default is None else f"{type(default).__name__}, such as {default!r}"
            raise ConfigError(f"{error}; expected a value of type {kind}") from error
        cause = error
        while (isinstance(cause, flags.Error) or "Error whilst parsing config file" in str(cause)) and cause.__context__:
            cause = cause.__context__  # config_flags wraps it, with its traceback as text
        raise ConfigError(f"{path} failed{where(path, cause)}: {type(cause).__name__}: {cause}") from error
    given = dict(line.overrides)
    if "model.path" in given and "model.origin" not in given:
        config.model.origin = ""  # says how to get the experiment's model, which another folder is not for
    if missing := [key for key, value in flatten(config).items() if value is None]:
        raise ConfigError("\n".join(f"{key} is required: set it in {path} or add --config.{key}=VALUE" for key in missing))
    for key, value in flatten(config).items():
        number = isinstance(schema[key], tuple) and schema[key] and not isinstance(schema[key][0], str)
        if isinstance(value, tuple) and not all(isinstance(item, (int, float) if number else str) for item in value):
            raise ConfigError(
                f"{key} = {value!r}: expected a tuple of {'numbers' if number else 'texts'}, such as {schema[key]!r}"
            )
    return config.lock(), line


def load_schema() -> config_dict.ConfigDict:
    from configs import common  # beside the package, and only on the path once a command line is read

    return common.get_config()


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


def split(argv: Sequence[str], schema: dict[str, Any], others: Sequence[str]) -> CommandLine:
    """Sorts the arguments into the experiment and its overrides, and refuses everything else."""
    given: dict[str, str] = {}
    problems = []
    rest = list(argv[1:])
    while rest:
        flag, equals, text = rest.pop(0).partition("=")
        key = flag.removeprefix("--config").removeprefix(".")
        if flag in ("--help", "-h"):
            with contextlib.suppress(BrokenPipeError):  # `--help | head` has seen enough
                print(usage(pathlib.Path(argv[0]).stem), flush=True)
            raise SystemExit(0)
        if flag.startswith("--noconfig.") and not equals and isinstance(schema.get(flag.removeprefix("--noconfig.")), bool):
            key, equals, text = flag.removeprefix("--noconfig."), "=", "false"
        elif flag != "--config" and not flag.startswith("--config."):
            raise ConfigError(unknown_flag(flag, schema, others))
        if not equals:
            if isinstance(schema.get(key), bool):
                text = "true"
            elif not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} has no value: write {flag}=VALUE")
            else:
                text = rest.pop(0)
        if key in given:
            raise ConfigError(f"{flag} is given twice: {given[key]} and {text}. Keep one")
        given[key] = text
        if key and key not in schema:
            inside = ", ".join(name for name in schema if name.startswith(key + "."))
            problems.append(f"{flag} is a section, not a key; its keys: {inside}" if inside else unknown_key(key, schema))
    if problems:
        raise ConfigError("\n".join(["configuration error (command line):", *problems]))
    file = given.pop("", "")
    if not file:
        raise ConfigError(f"no configuration: add --config=PATH, for instance one of {', '.join(experiments())}")
    return CommandLine(tuple(argv), file, tuple(given.items()))


def unknown_flag(flag: str, schema: dict[str, Any], others: Sequence[str]) -> str:
    if re.search(r"\.py(:|$)", flag) and not flag.startswith("-"):
        return f"unknown argument {flag}: did you mean --config={flag}?"
    bare = flag.lstrip("-").removeprefix("no").removeprefix("config.")
    same = difflib.get_close_matches(flag, ["--config", "--help", *others], cutoff=0.75)
    near = same or [f"--config.{key}=VALUE" for key in nearest(bare, schema)[:1] if flag.startswith("-")]
    hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(['--config=PATH', '--config.KEY=VALUE', *others])}"
    return f"unknown argument {flag}: {hint}"


def unknown_key(key: str, schema: dict[str, Any]) -> str:
    near = nearest(key, schema)
    hint = f"did you mean {' or '.join(near)}?" if near else "no key has a similar name; configs/common.py lists all"
    return f"unknown key {key}; {hint}"


def nearest(key: str, schema: dict[str, Any]) -> list[str]:
    """Up to three keys that `key` may stand for: what TRL or verl mean by it, the same leaf elsewhere, then similar spellings."""
    leaf = key.rpartition(".")[2]
    leaves = {name.rpartition(".")[2]: name for name in reversed(schema)} | ALIASES
    found = [ALIASES[leaf]] if leaf in ALIASES else []
    found += [name for name in schema if name.rpartition(".")[2] == leaf]
    found += difflib.get_close_matches(key, schema, n=2, cutoff=0.7)
    found += [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=2, cutoff=0.75)]
    return list(dict.fromkeys(found))[:3]


def quoted(text: str, default: Any) -> str:
    """A tuple of texts may be typed without quotes, `gsm8k:a.jsonl,math:b.parquet`; config_flags wants a Python literal."""
    if not isinstance(default, tuple) or (default and not isinstance(default[0], str)):
        return text
    with contextlib.suppress(SyntaxError, ValueError):  # a text may hold commas if it is typed as Python would write it
        if isinstance(items := ast.literal_eval(text.strip()), tuple | list):
            return repr(tuple(map(str, items)))
    inner = text.strip().strip("()[]")
    return repr(tuple(item.strip().strip("'\"") for item in inner.split(",") if item.strip()))


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
    for key, default, comment in re.findall(key_line, SCHEMA.read_text(), re.M):
        default = "(required)" if "placeholder" in default else default
        lines.append(f"  --config.{key}={default}" + (f"\n      {comment}" if comment else ""))
    return "\n".join(lines)


def where(path: str, error: Exception) -> str:
    """The line of an experiment at which an error arose."""
    if isinstance(error, SyntaxError):
        return f" at line {error.lineno}"
    file = pathlib.Path(path).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if pathlib.Path(frame.filename).resolve() == file]
    return f" at line {lines[-1]} `{file.read_text().splitlines()[lines[-1] - 1].strip()}`" if lines else ""
