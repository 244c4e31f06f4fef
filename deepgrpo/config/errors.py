"""The one error that a user mends, and what a check found."""

from typing import NamedTuple


class ConfigError(SystemExit):
    """A problem that the user mends on the command line or in a file.

    Like argparse's errors it ends the program with its message and no traceback (exit status 1) unless someone catches it.
    """


class Finding(NamedTuple):
    """One thing that a check of the inputs found: what is wrong, and what to do about it.

    fatal: the run cannot start with it. A finding that is not fatal becomes a warning in the log.
    """

    what: str
    remedy: str
    fatal: bool = True
