"""What a training or a tool does when its terminal, its reader or its disk is gone."""

import errno
import io
import subprocess
import sys

import pytest

from deepgrpo.config import streams
from tests.conftest import ROOT
from tests.faults.conftest import DEADLINE


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(errno.EIO, "Input/output error")


def test_a_steady_stream(tmp_path, caplog):
    broken = streams.Steady(Broken(), "standard output")
    for _ in range(3):
        print("step", file=broken, flush=True)
    assert [record.getMessage() for record in caplog.records if record.name == "deepgrpo.terminal"] == [
        "standard output cannot be written ([Errno 5] Input/output error): the run goes on and says no more there"
    ]
    closed = open(tmp_path / "closed", "w")
    steady = streams.Steady(closed, "standard error")
    closed.close()
    assert not steady.isatty() and steady.write("x") == 1
    with open(tmp_path / "latin", "w", encoding="ascii") as ascii_only:
        streams.Steady(ascii_only, "standard output").write("√2 \ud83d")
    assert (tmp_path / "latin").read_text() == "\\u221a2 \\ud83d"


TOOL = "from deepgrpo.config.streams import tool\nwith tool():\n    for i in range(99999): print(i)"


@pytest.mark.parametrize(("line", "status", "said"), [("| head -1", 0, "0\n"), ("> /dev/full", 1, "No space left on device")])
def test_a_tools_output_is_its_result(line, status, said):
    """A reader that has seen enough ends it quietly; a result that is lost is an error."""
    command = f"set -o pipefail; {sys.executable} -c '{TOOL}' {line}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == status and said in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr
