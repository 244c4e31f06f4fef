"""An interpreter: the student writes `<Code>` blocks of Python, and their output stands in an `<Execute>` block after each.

Every rollout has a workspace of its own, copied from the row's and gone afterwards. Files persist between blocks; names of Python
do not, since each block is a process of its own, in the sandbox.
"""

import pathlib
import re
import shutil
import tempfile

import ml_collections

from deepgrpo.config.errors import ConfigError
from deepgrpo.environments.base import Dialect, Environment, Episode, Reply
from deepgrpo.rewards.agents import sandbox
from deepgrpo.types import Problem

_CODE = re.compile(r"<Code>\s*(?:```(?:python|py)?\s*\n)?(.*?)(?:```\s*)?</Code>", re.DOTALL)


class Code(Environment):
    """A block's output depends on the files that earlier blocks wrote: states are restored by executing these again."""

    dialect = Dialect(stop_texts=("</Code>",))
    replay = "rerun"
    patience = 4.0  # code that takes too long is stopped, and the student is told; the sandbox itself takes time on a busy host

    def __init__(self, config: ml_collections.ConfigDict):
        """Raises ConfigError: this machine cannot isolate the code, and sandbox.allow_network does not say to do without."""
        seconds = config.agent.tool_seconds
        self.limits = sandbox.Limits(seconds=seconds, cpu_seconds=max(1, int(seconds)))
        self.allow_network = config.sandbox.allow_network
        try:
            sandbox.run(["true"], limits=self.limits, allow_network=self.allow_network)
        except (sandbox.SandboxUnavailable, sandbox.SandboxError) as error:
            raise ConfigError(f"agent.environment=code: {error}") from error

    def check(self, problem: Problem) -> str:
        folder = problem.extra.get("workspace")
        absent = folder and not pathlib.Path(folder).is_dir()
        return f"its workspace {folder} is absent; put the folder there, or prepare the data again" if absent else ""

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Code(self, problem.extra.get("workspace"))


class _Code(Episode):
    def __init__(self, environment: Code, source: str | None):
        self._environment, self._source = environment, source
        self._folder: pathlib.Path | None = None

    def step(self, words: str, handed_over: bool) -> Reply:
        code = _CODE.search(words)
        if not (handed_over and code and code[1].strip()):
            return Reply(None)
        environment = self._environment
        try:
            options = {"limits": environment.limits, "allow_network": environment.allow_network}
            output = sandbox.execute_code(code[1], self._workspace(), **options)
        except (sandbox.SandboxUnavailable, sandbox.SandboxError, OSError) as error:
            return Reply(None, failed=f"sandbox: {type(error).__name__}: {error}"[:200], counts={"calls": 1})
        counts = {"calls": 1, "errors": sandbox.ERROR in output}
        return Reply(f"\n<Execute>\n{output.rstrip()}\n</Execute>\n", counts=counts)

    def _workspace(self) -> pathlib.Path:
        """Made with the first block: many answers run none."""
        if self._folder is None:
            self._folder = pathlib.Path(tempfile.mkdtemp(prefix="deepgrpo-workspace-"))
            if self._source:
                shutil.copytree(self._source, self._folder, dirs_exist_ok=True)  # copies, never links to the row's own files
        return self._folder

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
