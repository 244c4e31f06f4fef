"""The house rules that a machine can hold: imports point down, no cycles, short files, a light `import deepgrpo`."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "deepgrpo").rglob("*.py"))
FLOORS = {  # room or file: floor; what is not named here is an entry point, on the top floor
    **dict.fromkeys(("types", "model", "endpoint", "config"), 1),
    **dict.fromkeys(("curriculum", "rollout", "rewards", "learner", "data", "telemetry", "environments"), 2),
    **dict.fromkeys(("loops", "teacher", "weights", "preflight"), 3),
}
TOP = 4
PLUGIN = "deepgrpo.rollout.vllm_plugin"
HEAVY = ("jax", "flax", "torch", "transformers", "vllm", "tensorboardX", "matplotlib", "openai", "pyarrow")


def module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def imports(path: pathlib.Path) -> set[str]:
    """Names of all the modules that a file imports, wherever in it; ours are resolved to the module that is meant."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found |= {f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in MODULES else node.module for a in node.names}
    return found


def floor(module: str) -> int:
    parts = module.split(".")
    return FLOORS.get(parts[1], TOP) if len(parts) > 1 else 0


def test_imports_point_down():
    arrows = [(name, imported) for name, path in MODULES.items() for imported in imports(path) & MODULES.keys()]
    assert not [arrow for arrow in arrows if floor(arrow[1]) > floor(arrow[0])], "a module imports from a floor above"
    assert not [arrow for arrow in arrows if floor(arrow[1]) == TOP], "a module imports an entry point"


def test_no_import_cycles():
    graph = {name: (imports(path) & MODULES.keys()) - {name, "deepgrpo"} for name, path in MODULES.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


def test_files_are_short():
    long = {name: text.count("\n") for name, path in MODULES.items() if (text := path.read_text()).count("\n") > 500}
    assert not long
    assert MODULES["deepgrpo.train"].read_text().count("\n") <= 400


def test_torch_and_vllm_stay_outside():
    plugin = {name for name in MODULES if name.startswith(PLUGIN)}  # runs in vLLM's environment, and nowhere else
    for name, path in MODULES.items():
        found = imports(path)
        if name in plugin:
            assert not {module for module in found if module.split(".")[0] in ("jax", "flax", "deepgrpo")}, name
        else:
            assert not {module.split(".")[0] for module in found} & {"torch", "vllm"}, name
            assert not found & plugin, f"{name} imports the plugin of vLLM"


def test_package_and_configuration_import_nothing_heavy():
    """With the heavy packages made impossible to import: what is not there cannot be needed, nor cost time."""
    code = f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))\nimport deepgrpo, deepgrpo.config, deepgrpo.types\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
