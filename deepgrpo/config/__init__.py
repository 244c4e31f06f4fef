"""What a run is: from the command line to a checked configuration, its inputs and the record of it in the run folder.

Nothing in here imports JAX or loads a model: a mistyped key, a missing file or an unreachable teacher is reported within seconds.
"""

from collections.abc import Sequence

from ml_collections import config_dict

from deepgrpo.config import flags
from deepgrpo.config.errors import ConfigError, Finding, Setup
from deepgrpo.config.flags import CommandLine, flatten
from deepgrpo.config.folders import began, run_folder, write_resolved
from deepgrpo.config.rules import process_problems, validate

__all__ = [
    "CommandLine",
    "ConfigError",
    "Finding",
    "Setup",
    "began",
    "flatten",
    "from_command_line",
    "process_problems",
    "run_folder",
    "validate",
    "write_resolved",
]


def from_command_line(argv: Sequence[str], others: Sequence[str] = ()) -> tuple[config_dict.ConfigDict, CommandLine]:
    """Reads the command line as `flags.read` does and checks every value; raises ConfigError with all problems."""
    config, line = flags.read(argv, others)
    validate(config)
    return config, line
