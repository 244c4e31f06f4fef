"""Set-up: whatever goes wrong becomes one message without a traceback; what the program did wrong later keeps its own."""

import errno
import io
import logging
import os
import re

import pytest
import rich.table
import rich.text
import rich.tree

from deepgrpo.config.errors import CONTROL, ConfigError, Setup, remedy_of
from deepgrpo.telemetry import dumps
from deepgrpo.telemetry.log import Console, close_log, open_log
from deepgrpo.telemetry.metrics import RecordError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("data: rows.jsonl, row 3: answer is a list"), "head: data: rows.jsonl, row 3: answer is a list"),
        (ConfigError("a -> b"), "head: a -> b"),
        (ConfigError("head: 2 problems"), "head: 2 problems"),  # told already, with its own head
        (SystemExit("error: no such set"), "head: no such set"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "head: /data/x: Permission denied -> have its owner"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "r" * 9), "head: rrrrrrrrr: File name too long -> choose a shorter"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "head: UnicodeDecodeError: 'utf-8' codec"),
        (ImportError("no module x"), "head: ImportError: no module x"),
    ],
)
def test_what_the_user_mends_is_one_message(error, told):
    with pytest.raises(ConfigError) as caught, Setup("head"):
        raise error
    assert told in str(caught.value)


def test_the_traceback_goes_to_the_log_or_stays(tmp_path):
    with pytest.raises(KeyError), Setup("head", tmp_path / "absent" / "log.txt"):
        raise KeyError("x")  # no log could take it
    log = tmp_path / "log.txt"
    with pytest.raises(ConfigError, match="KeyError: 'x'(.|\n)*traceback: .*log.txt") as caught, Setup("head", log):
        raise KeyError("x")
    assert "Traceback" not in str(caught.value) and 'raise KeyError("x")' in log.read_text()


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(errno.ENOSPC, "No space"), KeyError("a bug")])
def test_after_the_set_up_an_error_is_its_own_unless_the_program_raised_it_on_purpose(error, tmp_path):
    for head in ("", "run x stopped"):
        with pytest.raises(type(error)) as caught, Setup("head", tmp_path / "log.txt") as setup:
            setup.done(head)
            raise error
        assert caught.value is error
    with pytest.raises(ConfigError, match="^run x stopped: disk full") as caught, Setup("head", tmp_path / "log.txt") as setup:
        setup.done("run x stopped")
        raise RecordError("disk full")
    assert "Traceback" not in str(caught.value) and "RecordError" in (tmp_path / "log.txt").read_text()


def test_an_end_that_is_no_error_passes():
    for code in (0, 2, None):
        with pytest.raises(SystemExit) as caught, Setup("head"):
            raise SystemExit(code)
        assert caught.value.code == code


@pytest.mark.parametrize(("number", "remedy"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "make room"), (errno.ERANGE, "")])
def test_the_systems_refusal_is_found_behind_a_librarys_error(number, remedy):
    error = RuntimeError("the store failed")
    error.__cause__ = RuntimeError(f"INTERNAL: open: {os.strerror(number)} [tensorstore]")  # in the words of the system
    assert remedy in remedy_of(error) and bool(remedy) == bool(remedy_of(error))


STEERING = "a\x1b]0;title\x07b\x1b[2Jc\r\x9b31m\u202e\x7f"
SHOWN = r"a\x1b]0;title\x07b\x1b[2Jc\r\x9b31m\u202e\x7f"


def test_control_characters_are_shown_not_sent(tmp_path, capsys):
    """By every way to a terminal: messages, the log, tables and trees, dumps."""
    assert str(ConfigError(f"{STEERING}\n\tx")) == f"{SHOWN}\n\tx"
    handler = open_log(tmp_path)
    logging.getLogger("deepgrpo.test").info("answer: %s", STEERING)
    close_log(handler)
    assert capsys.readouterr().out == f"answer: {SHOWN}\n" and (tmp_path / "log.txt").read_text().endswith(f"answer: {SHOWN}\n")
    table = rich.table.Table("set")
    table.add_row(STEERING)
    branch = rich.tree.Tree("tree")
    branch.add(rich.text.Text(STEERING))
    for thing in (STEERING, table, branch):
        console = Console(file=io.StringIO(), width=200, force_terminal=True)
        console.print(thing, style="red")
        printed = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())  # the console's own colours
        assert not CONTROL.search(printed) and r"\x1b]0;title" in printed
    dumps.write(tmp_path / "1.jsonl", [{"output": STEERING}])
    assert not CONTROL.search((tmp_path / "1.jsonl").read_text())
    assert dumps.read(tmp_path / "1.jsonl") == [{"output": STEERING}]
