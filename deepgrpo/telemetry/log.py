"""The run's log: everything that is said goes to the terminal and, with the time, to `<run>/log.txt`."""

import logging
import pathlib
import sys


def open_log(run_folder: str | pathlib.Path) -> logging.Handler:
    """Sends the records of the `deepgrpo` loggers there; close it with `close_log`. A resumed run appends."""
    folder = pathlib.Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("deepgrpo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [terminal, handler]  # replaced, not added to: a program may run more than one run
    return handler


def close_log(handler: logging.Handler) -> None:
    logging.getLogger("deepgrpo").removeHandler(handler)
    handler.close()
