"""The one error that a user mends, what a check found, and the one handler that turns errors of set-up into it."""

import datetime
import errno
import os
import pathlib
import re
import signal
import traceback
from typing import NamedTuple

REMEDIES = {  # of the operating system's refusals, each named for what it is
    errno.EMFILE: "raise the limit of open files before the start: ulimit -n 4096",
    errno.ENFILE: "the machine's table of open files is full: end other programs, or raise fs.file-max",
    errno.ENOSPC: "make room on that disk, or set --config.run_dir to a larger one",
    errno.EDQUOT: "make room in your quota, or set --config.run_dir to another disk",
    errno.EACCES: "have its owner give you the right (ls -ld shows who that is), or choose another folder",
    errno.EPERM: "have its owner give you the right (ls -ld shows who that is), or choose another folder",
    errno.EROFS: "it is mounted read-only: choose a folder on a disk that can be written",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "its symbolic links lead in a circle: remove or mend them",
    errno.ENOTDIR: "a part of this path is a file: move it away, or choose another folder",
    errno.EISDIR: "a folder stands where a file is expected: move it away",
    errno.EEXIST: "something of this name is in the way: move it away, or choose another name",
    errno.ENOENT: "put it there, or name another one",
    errno.EIO: "the disk or its network failed: look at the system's log, and start again once it works",
    errno.ESTALE: "the network folder was lost: mount it again",
    errno.ENOMEM: "end other programs, or use a machine with more memory",
    errno.EAGAIN: "raise the limit of processes: ulimit -u 4096",
    errno.EADDRINUSE: "another program has that port: end it, or choose another port",
}
QUOTED = (errno.EMFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EACCES, errno.EIO)  # by libraries


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # tab and new line are text


def shown(text: str) -> str:
    """Text for a terminal: its control characters, and marks that turn its direction, are shown, not sent."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


#### Secrets of this machine, taken out of every text that is kept or shown

SECRET_NAME = re.compile(
    r"(^|_|API)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE
)  # of an environment variable
SHORTEST_SECRET = 6  # characters; what is shorter, like EMPTY, is a word that says "none"
USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # user and password of an address
REGISTERED: set[str] = set()


def register_secret(secret: str) -> None:
    """Adds a secret whose variable has an unusual name."""
    REGISTERED.add(secret)


def redact(text: str) -> str:
    """The text without the values of environment variables that are named like keys, registered secrets, or users in addresses.

    Paths (of key files) stay.
    """
    values = " ".join({value for name, value in os.environ.items() if SECRET_NAME.search(name)} | REGISTERED).split()
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= SHORTEST_SECRET and not value.startswith("/"):
            text = text.replace(value, "[redacted]")
    return USER.sub("[redacted]", text)


#### Errors


class ConfigError(SystemExit):
    """A problem that the user mends on the command line or in a file.

    Like argparse's errors it ends the program with its message and no traceback (exit status 1) unless someone catches it.
    """

    def __init__(self, message: str):
        super().__init__(redact(shown(message)))


class Finding(NamedTuple):
    """One thing that a check of the inputs found: what is wrong, and what to do about it.

    fatal: the run cannot start with it. A finding that is not fatal becomes a warning in the log.
    """

    what: str
    remedy: str
    fatal: bool = True


class Setup:
    """The set-up of a program, as a `with` block: what goes wrong in it is the user's to mend, and is told without a traceback.

    Args:
      head: how the message begins, such as "run NAME cannot start".
      log: a file that gets the traceback, if its folder exists.

    Once `done` was called, the head is another, and errors pass unchanged but for those that this program raises on purpose. So
    does, without a log, an error of any other kind: its traceback is all there is. The block may be entered again inside itself.

    Raises:
      ConfigError: in place of the error.
    """

    def __init__(self, head: str, log: pathlib.Path | None = None):
        self.head, self.log, self._done = head, log, False

    def done(self, head: str = "") -> None:
        """The set-up is over. head: how the message about a later error begins; "": all pass."""
        self._done, self.head = True, head

    def __enter__(self) -> "Setup":
        return self

    def __exit__(self, _kind, error: BaseException | None, _traceback) -> None:
        if isinstance(error, SystemExit) and (self._done or not isinstance(error.code, str)):
            return
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(128 + signal.SIGINT) from error  # as a shell would say it, without a traceback
        if self._done and not (self.head and type(error).__module__.startswith("deepgrpo.")):
            return
        if isinstance(error, SystemExit):
            text = error.code.removeprefix("error: ")
            if not text.startswith((f"{self.head}:", "configuration error")):
                raise ConfigError(f"{self.head}: {text}") from error
        elif isinstance(error, Exception):
            kept, ours = self._keep(error), type(error).__module__.startswith("deepgrpo.")
            if kept or ours or isinstance(error, OSError | ValueError | ImportError):
                where = f"\n   (traceback: {self.log})" if kept and not ours else ""
                raise ConfigError(f"{self.head}: {describe(error)}{where}") from error

    def _keep(self, error: Exception) -> bool:
        """Writes the traceback to the log; False where there is none."""
        try:
            with open(self.log, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} ERROR {self.head}\n")
                file.write(redact("".join(traceback.format_exception(error))))
        except (OSError, TypeError):
            return False
        return True


def describe(error: BaseException) -> str:
    """What happened, with the file where the error names one, and the remedy if the operating system refused something."""
    remedy = remedy_of(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    else:
        text = str(error) or type(error).__name__
        if not type(error).__module__.startswith("deepgrpo.") and type(error) not in (OSError, ValueError, FileNotFoundError):
            text = text if text == type(error).__name__ else f"{type(error).__name__}: {text}"
    return f"{text} -> {remedy}" if remedy and "->" not in text else text


def remedy_of(error: BaseException) -> str:
    """What helps against the operating system's refusal that an error, or one that led to it, is or quotes; "" for others."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, OSError) and error.errno in REMEDIES:
            return REMEDIES[error.errno]
        for number in QUOTED:
            if os.strerror(number) in str(error):
                return REMEDIES[number]
        seen.append(error)
        error = error.__cause__ or error.__context__
    return ""
