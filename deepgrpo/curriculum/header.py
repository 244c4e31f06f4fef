"""The header of a saved curriculum: which pool wrote the folder, in which version of its format."""

import json
import pathlib
from typing import Any

NAME = "curriculum.json"


def write_header(folder: str, pool: str, version: int, fields: dict[str, Any]) -> None:
    text = json.dumps({"pool": pool, "version": version} | fields, indent=1, sort_keys=True)
    (pathlib.Path(folder) / NAME).write_text(text + "\n", encoding="utf-8")


def read_header(folder: str, pool: str, version: int) -> dict[str, Any]:
    """Returns the header's fields.

    Raises:
      ValueError: the folder was written by another pool or in another version; names both.
    """
    path = pathlib.Path(folder) / NAME
    if not path.is_file():
        raise ValueError(f"{path} is absent: expected a saved curriculum of pool type {pool!r}, version {version}")
    header = json.loads(path.read_text(encoding="utf-8"))
    if header["pool"] != pool:
        raise ValueError(
            f"{path}: saved by pool type {header['pool']!r}, but this run uses {pool!r}; "
            f"set curriculum.pool={header['pool']} or start a new run"
        )
    if header["version"] != version:
        raise ValueError(
            f"{path}: format version {header['version']} of pool {pool!r}, but this code reads version {version}; "
            "resume with the code that wrote it or start a new run"
        )
    return header
