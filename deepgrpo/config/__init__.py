"""What a run is: from the command line to a checked configuration, its inputs and the record of it in the run folder.

Nothing in here imports JAX or loads a model: a mistyped key, a missing file or an unreachable teacher is reported within seconds.
"""

from deepgrpo.config.errors import ConfigError, Finding, Setup
from deepgrpo.config.flags import CommandLine, flatten
from deepgrpo.config.folders import began, run_folder, write_resolved

__all__ = [
    "CommandLine",
    "ConfigError",
    "Finding",
    "Setup",
    "began",
    "flatten",
    "run_folder",
    "write_resolved",
]
