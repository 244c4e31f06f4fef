"""What a run is: from the command line to a checked configuration, its inputs and the record of it in the run folder.

Nothing in here imports JAX or loads a model: a mistyped key, a missing file or an unreachable teacher is reported within seconds.
"""

from deepgrpo.config.command_line import CommandLine, flatten, from_command_line, validate
from deepgrpo.config.constraints import process_problems
from deepgrpo.config.errors import ConfigError, Finding, Setup
from deepgrpo.config.resolved import began, run_folder, write_resolved

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
