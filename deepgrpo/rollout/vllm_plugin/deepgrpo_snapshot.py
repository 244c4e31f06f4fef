"""What a snapshot's files say about themselves, checked without reading a single weight.

A snapshot is a folder of safetensors files, with model.safetensors.index.json when there are several, and maybe manifest.json:
{"files": {name: {"size": bytes}}}. A safetensors file is 8 bytes of header length, a JSON header with every tensor's type, shape
and place, and the data.
"""

import dataclasses
import json
import math
import os
import pathlib

INDEX, SINGLE, MANIFEST = "model.safetensors.index.json", "model.safetensors", "manifest.json"
BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # types that the learner writes
HEADER_LIMIT = 100 * 2**20  # bytes


class SnapshotError(Exception):
    """The snapshot is not what it has to be; says which file, what was found and what was expected."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor: the file that holds it, and its shape there."""

    file: pathlib.Path
    shape: tuple[int, ...]


def locate(path: str, root: str) -> pathlib.Path:
    """The snapshot's real path, which must lie below `root`: who may call the server may not make it read just any file."""
    folder, allowed = pathlib.Path(path).resolve(), pathlib.Path(root).resolve()
    if allowed not in folder.parents:
        raise SnapshotError(f"{path}: outside {allowed}, the only place that this server loads weights from")
    if not folder.is_dir():
        raise SnapshotError(f"{path}: no such folder; a load is asked for once the snapshot has its final name")
    return folder


def read(folder: pathlib.Path) -> dict[str, Entry]:
    """Tensor name -> entry, of a snapshot whose files are all there, whole, and hold what index and manifest say."""
    _check_manifest(folder)
    names, weight_map = [SINGLE], None
    if (folder / INDEX).is_file():
        weight_map = _json(folder / INDEX)["weight_map"]
        names = sorted(set(weight_map.values()))
    elif not (folder / SINGLE).is_file():
        raise SnapshotError(f"{folder}: neither {SINGLE} nor {INDEX} is there, found {', '.join(_listing(folder)) or 'nothing'}")
    found: dict[str, Entry] = {}
    for name in names:
        header = _header(folder / name)
        if twice := found.keys() & header.keys():
            raise SnapshotError(f"{folder / name}: holds tensors that another file holds already: {', '.join(sorted(twice))}")
        found |= header
    if weight_map is not None:
        wrong = {tensor for tensor, name in weight_map.items() if tensor not in found or found[tensor].file.name != name}
        wrong |= found.keys() - weight_map.keys()
        if wrong:
            examples = ", ".join(sorted(wrong)[:5])
            raise SnapshotError(f"{folder / INDEX}: the files do not hold what it says, for instance {examples}")
    return found


def _header(path: pathlib.Path) -> dict[str, Entry]:
    """The entries of one safetensors file, whose length is compared with what they need."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise SnapshotError(f"{path}: no safetensors file, or cut off: header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise SnapshotError(f"{path}: not found") from error
    except ValueError as error:
        raise SnapshotError(f"{path}: its header cannot be read: {error}") from error
    header.pop("__metadata__", None)
    entries, end = {}, 0
    for name, spec in header.items():
        if spec["dtype"] not in BYTES:
            raise SnapshotError(f"{path}: {name} is of type {spec['dtype']}, expected one of {', '.join(BYTES)}")
        start, stop = spec["data_offsets"]
        if stop - start != math.prod(spec["shape"]) * BYTES[spec["dtype"]]:
            raise SnapshotError(f"{path}: {name} of shape {spec['shape']} has {stop - start} bytes")
        entries[name] = Entry(path, tuple(spec["shape"]))
        end = max(end, stop)
    if size != 8 + length + end:
        raise SnapshotError(f"{path}: has {size} bytes, its header describes {8 + length + end}; the file was cut off or damaged")
    return entries


def _check_manifest(folder: pathlib.Path) -> None:
    if not (folder / MANIFEST).is_file():
        return
    for name, entry in _json(folder / MANIFEST)["files"].items():
        path, expected = folder / name, entry["size"]
        found = os.path.getsize(path) if path.is_file() else None
        if found != expected:
            raise SnapshotError(f"{path}: {'not found' if found is None else f'{found} bytes'}, {MANIFEST} says {expected} bytes")


def _json(path: pathlib.Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SnapshotError(f"{path}: is no JSON: {error}") from error


def _listing(folder: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())[:20]
