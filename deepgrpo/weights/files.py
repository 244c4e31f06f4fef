"""Writing to disk so that a crash at any moment leaves either the old content or the new one, never a mixture."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator


def sync(path: pathlib.Path) -> None:
    """Forces a file's content, or a folder's list of names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: pathlib.Path) -> None:
    """Forces everything below `folder` onto the disk, files before the folders that name them."""
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(pathlib.Path(parent, name))
        sync(pathlib.Path(parent))


def replace_text(path: pathlib.Path, text: str) -> None:
    """Replaces the file's content by `text` in one rename."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sweep(folder: pathlib.Path) -> None:
    """Removes what `replace_text` and other writers left half-made in a folder that nobody else writes to."""
    for pattern in (".*.tmp-*", "*.part", "*/*.part"):
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink()


@contextlib.contextmanager
def new_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty temporary folder that becomes `folder` when the block ends, or vanishes when it raises.

    Raises:
      FileExistsError: `folder` exists and is not empty.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder}: exists already, expected a new or empty folder. Remove it or choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        sync_tree(temporary)
        os.rename(temporary, folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # the error that is on its way out matters more
        raise
