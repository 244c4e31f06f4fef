"""Measures the house: lines, files, keys, and what a reader stumbles over. `python -m tests.house` prints the table."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent


def code_lines(path: pathlib.Path) -> int:
    """Returns the lines of a Python file that are neither blank, comment nor docstring."""
    text = path.read_text()
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in documented for i, line in lines)


def parameters(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns (number of parameters, "file:function") of each function of a file; `self` and `cls` do not count."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
            found.append((len([name for name in names if name not in ("self", "cls")]), f"{path.relative_to(ROOT)}:{node.name}"))
    return found


def measure() -> dict[str, int]:
    """Returns the figures by name."""
    from configs import common
    from deepgrpo import config as config_lib

    package, tests = sorted((ROOT / "deepgrpo").rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
    sizes = [path.read_text().count("\n") for path in package]
    return {
        "deepgrpo: files": len(package),
        "deepgrpo: lines": sum(sizes),
        "deepgrpo: lines of code": sum(map(code_lines, package)),
        "deepgrpo: longest file": max(sizes),
        "deepgrpo: lines of train.py": (ROOT / "deepgrpo" / "train.py").read_text().count("\n"),
        "deepgrpo: most parameters of a function": max(count for path in package for count, _ in parameters(path)),
        "deepgrpo: imports after code (noqa: E402)": sum(path.read_text().count("noqa: E402") for path in package),
        "configs: keys": len(config_lib.flatten(common.get_config())),
        "tests: lines": sum(path.read_text().count("\n") for path in tests),
    }


if __name__ == "__main__":
    for name, figure in measure().items():
        print(f"{name:45}{figure:>8,}")
