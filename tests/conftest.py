"""Shared set-up: JAX on CPU with eight fake devices and a quick compiler, and the golden and data folders."""

import ctypes
import fcntl
import functools
import gc
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The programs of tests are tiny and run a few times: compiling them is most of the cost, and optimising them most of compiling.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count=8 {QUICK}")

import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def shared_folder(name: str, variable: str) -> pathlib.Path:
    """The folder that an environment variable names, else ../shared/<name> beside the checkout; may be absent."""
    return pathlib.Path(os.environ.get(variable, ROOT.parent / "shared" / name))


def golden_files(pattern: str) -> list[pathlib.Path]:
    return sorted(shared_folder("golden", "DEEPGRPO_GOLDEN").glob(pattern))


def golden_cases(pattern: str, kinds: set[str]) -> list:
    """Parametrisation of a suite's cases of the given kinds, or one skipped case if there is no file."""
    files = golden_files(pattern)
    cases = [
        pytest.param(case, id=case["name"])
        for path in files
        for case in json.loads(path.read_text())["cases"]
        if case["kind"] in kinds
    ]
    assert cases or not files, f"no case of the kinds {kinds} in {files}"
    absent = pytest.mark.skip(reason=f"golden cases {pattern} are absent: set DEEPGRPO_GOLDEN")
    return cases or [pytest.param(None, marks=absent, id="absent")]


@pytest.fixture(scope="session")
def data_folder() -> pathlib.Path:
    folder = shared_folder("data", "DEEPGRPO_DATA")
    if not folder.is_dir():
        pytest.skip(f"real data sets are absent: {folder} (set DEEPGRPO_DATA)")
    return folder


@pytest.fixture(scope="session")
def student() -> pathlib.Path:
    """The demo's warm-started student; made on first use (a minute or two), cached in the checkout by its recipe's hash."""
    from configs import carry_chain

    folder = ROOT / carry_chain.get_config().model.path
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # with it, the demo's student is another
    command = [sys.executable, "-m", "deepgrpo.warm_start", "--config=configs/carry_chain.py"]
    (ROOT / ".cache").mkdir(exist_ok=True)
    with open(ROOT / ".cache" / "student.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes, one makes it
        if not folder.is_dir():  # which appears at once and complete
            made = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=900)
            assert made.returncode == 0, made.stdout + made.stderr
    return folder


def enter_documented(heading: str, module_name: str, entries: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the module that docs/method.md shows below a heading, makes the entry that it shows, and returns the entry's name."""
    section = (ROOT / "docs" / "method.md").read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    source, entry = re.findall(r"```python\n(.*?)```", section, re.S)
    module = types.ModuleType(module_name)
    monkeypatch.setitem(sys.modules, module_name, module)
    exec(compile(source, "docs/method.md", "exec"), module.__dict__)
    ((name, place),) = re.findall(r'\["(\w+)"\] = "(.+)"', entry)
    monkeypatch.setitem(entries, name, place)
    return name


@pytest.fixture(autouse=True, scope="session")
def compiled_once():
    """Learners that are alike in all that a program is made of share it in a test process; engines likewise."""
    from deepgrpo.learner.objective import Objective
    from deepgrpo.learner.step import Programs
    from deepgrpo.rollout import native

    known, compiler = {}, Programs._compile

    def compiled(self, name, shape):
        sections = repr(Objective.from_config(self.config.objective)), self.config.optim.to_json()
        numbers = self.config.rollout.temperature, self.config.learner.logprob_block
        key = name, shape, self.model, self.mesh, repr(self.abstract_state), sections, numbers
        if key not in known:
            known[key] = compiler(self, name, shape)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "_compile", compiled)
        patch.setattr(native, "Programs", functools.cache(native.Programs))
        yield


@pytest.fixture(autouse=True, scope="module")
def bounded_memory():
    """A test process that has compiled much forgets it between files: four of them share a machine."""
    yield
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])  # that it holds now
    if "jax" in sys.modules and pages * resource.getpagesize() > 1.5e9:
        sys.modules["jax"].clear_caches()
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints what tests have recorded as `figures`, from whichever process they ran in."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == "figures" and report.when == "call":
                terminalreporter.write_sep("-", report.nodeid)
                terminalreporter.write_line(text)
