"""What a person sees of a run: its log, the console, the progress line; and the clock of a step's parts.

Everything that is said goes to the terminal and, with the time, to `<run>/log.txt`. A warning or an error that repeats within a
step, because every answer or every request meets the same fault, is said once; how often it came is said at the end of the step
(`end_step`). Its traceback is said once a run, and so is the whole record if it has the attribute `once`.
"""

import collections
import contextlib
import logging
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import rich.console
import rich.live
import rich.text
from rich.segment import Segment

from deepgrpo.config.errors import describe, redact, shown
from deepgrpo.telemetry import waits

VARIANTS = 20  # different texts of one line of code, a step
STAGES = {  # what a part waits for, for the watchdog's line
    "gen": "rollouts and their verdicts",
    "teacher_wait": "the teacher's corrections (teacher.synchronous)",
    "publish": "the engine, to take the new weights",
    "testing": "validation",
    "save_checkpoint": "the checkpoint, to be written",
}
SHOWN_PARTS = {"gen": "rollouts", "update_actor": "update", "teacher_wait": "teacher", "testing": "validation"}

log = logging.getLogger(__name__)


class OncePerStep(logging.Filter):
    """Lets the first warning of a kind through and counts the others.

    The kind is the line of code that it comes from and its first line of text, numbers aside. A line of code that says more than
    `VARIANTS` different things in a step quotes its items: what comes after is one kind.
    """

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple] = collections.Counter()
        self._texts: dict[tuple, str] = {}  # the newest of each kind
        self._explained: set[tuple] = set()  # kinds whose traceback was said

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or getattr(record, "summary", False):
            return True
        if not hasattr(record, "first"):  # each handler asks
            text = record.getMessage().partition("\n")[0]
            place = record.name, record.lineno
            kind = *place, re.sub(r"\d+", "#", text)[:200]
            with self._lock:
                if kind not in self._counts and sum(known[:2] == place for known in self._counts) >= VARIANTS:
                    kind = *place, ""
                self._counts[kind] += 1
                once = getattr(record, "once", False) and kind in self._explained
                record.first = self._counts[kind] == 1 and not once
                self._texts[kind] = text[:200]
                if record.first and kind in self._explained:
                    record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
                self._explained.add(kind)
        return record.first

    def counts(self) -> list[tuple[str, str, int]]:
        """(logger, text, how often it came) of the kinds that repeated since the last call."""
        with self._lock:
            repeated = [(kind[0], self._texts[kind], count) for kind, count in self._counts.items() if count > 1]
            self._counts.clear()
            self._texts.clear()
        return repeated


class Redacted(logging.Formatter):
    """Formats a record, traceback included, without the keys of this machine and without what would steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(redact(super().format(record)))


class LogFile(logging.FileHandler):
    """The log's file. When it can no longer be written, the terminal says so once."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed and sys.stderr:
            print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}): the run goes on without it", file=sys.stderr)
        self.failed = True


@contextlib.contextmanager
def no_end(what: str) -> Iterator[None]:
    """A block that only shows something: its failure is said once a run, and ends nothing."""
    try:
        yield
    except Exception as error:
        unforeseen = None if isinstance(error, OSError) else error
        log.warning("%s could not be written: %s", what, describe(error), exc_info=unforeseen, extra={"once": True})


_repeats = OncePerStep()


def open_log(run_folder: str | pathlib.Path) -> logging.Handler:
    """Sends the records of the `deepgrpo` loggers there; close it with `close_log`. A resumed run appends."""
    global _repeats
    _repeats = OncePerStep()
    folder = pathlib.Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    handler = LogFile(folder / "log.txt", encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Redacted("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler(sys.stdout)
    terminal.setFormatter(Redacted("%(message)s"))
    for one in (handler, terminal):
        one.addFilter(_repeats)
    logger = logging.getLogger("deepgrpo")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [terminal, handler]  # replaced, not added to: a program may run more than one run
    return handler


def end_step() -> None:
    """Says how often the step's repeated warnings came."""
    for name, text, count in _repeats.counts():
        logging.getLogger(name).warning("%d times in this step: %s", count, text, extra={"summary": True})


def close_log(handler: logging.Handler) -> None:
    end_step()
    logging.getLogger("deepgrpo").removeHandler(handler)
    handler.close()


#### The console


class Console(rich.console.Console):
    """Rich's, but a text's own control characters are shown, not sent: texts are of models and of files, and may hold any."""

    def render(self, *arguments: Any, **keys: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **keys):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def on_broken_pipe(self) -> None:
        """Rich's own ends the program; here the caller decides (`no_end`, `tool`)."""
        raise  # noqa: PLE0704  the error that it was called for


#### Progress


class Timer:
    """Seconds spent in the named parts of a step, as `timing_s/<part>`; parts may nest, each counts its own whole time.
    The log says which part takes long (`waits`)."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, part: str, name: str = "") -> Iterator[None]:
        """name: of the part in the watchdog's line, where `STAGES` has none."""
        start = self._clock()
        try:
            with waits.on(name or STAGES.get(part, part)):
                yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + self._clock() - start

    def metrics(self) -> dict[str, float]:
        """Returns {`timing_s/<part>`: seconds} since the last call, and starts again."""
        seconds, self._seconds = self._seconds, {}
        return {f"timing_s/{part}": value for part, value in seconds.items()}


class Progress:
    """Shows how a run goes.

    train: `train` of the configuration, which says what ends it. begun: `training/*` where this start begins; the time left is
    estimated from its pace.
    console: of rich; standard output by default.
    """

    def __init__(
        self,
        train: Any,
        begun: Mapping[str, float],
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        ends = {"global_step": train.steps, "passes": 0 if train.steps else train.epochs, "student_tokens": train.student_tokens}
        self._ends = {f"training/{name}": end for name, end in ends.items() if end}
        self._begun_at = dict(begun)
        self._clock, self._begun = clock, clock()
        self._validation = math.nan
        self._console = console or Console()
        self._live = None
        if self._console.is_terminal:
            with no_end("the progress line"):
                self._live = rich.live.Live(console=self._console, auto_refresh=False, transient=False)
                self._live.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a finished step, given everything that goes into metrics.jsonl for it."""
        with no_end("the progress line"):
            self._validation = validation_score(metrics, self._validation)
            known = {"training/global_step": step, **metrics}
            line = progress_line(step, self._ends, known, self._validation, self.seconds_left(known))
            if self._live:
                self._live.update(rich.text.Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            else:
                self._console.print(line, highlight=False, soft_wrap=True)

    def seconds_left(self, metrics: Mapping[str, float]) -> float:
        """Extrapolates this start's pace to the end that comes first; NaN before its first step."""
        elapsed = self._clock() - self._begun
        ends = [
            (metrics[name] - self._begun_at[name], end - metrics[name]) for name, end in self._ends.items() if name in metrics
        ]
        return min((elapsed / made * max(left, 0.0) for made, left in ends if made > 0), default=math.nan)

    def close(self) -> None:
        live, self._live = self._live, None
        if live:
            with no_end("the progress line"):
                live.stop()


def validation_score(metrics: Mapping[str, float], last: float) -> float:
    """The average over sources if there is one, else the first source's score, else (no validation in this step) `last`."""
    scores = {key: value for key, value in metrics.items() if key.startswith("val-core/") and "/reward/mean@" in key}
    averages = [value for key, value in scores.items() if key.startswith("val-core/avg/")]
    return next(iter(averages or scores.values()), last)


def format_position(position: Mapping[str, float]) -> str:
    """Where a run is, of its `training/*` metrics."""
    step, passes, tokens = (position[f"training/{name}"] for name in ("global_step", "passes", "student_tokens"))
    return f"step {step}, {passes:.2f} passes over the data, {tokens} student tokens"


def progress_line(
    step: int, ends: Mapping[str, float], metrics: Mapping[str, float], validation: float, seconds_left: float
) -> str:
    """The line: step, passes, reward, validation, forest, teacher, time; a part without its metric is left out."""
    parts = [f"step {step}" + (f"/{ends['training/global_step']}" if "training/global_step" in ends else "")]
    if "training/passes" in metrics:
        of = f"/{ends['training/passes']}" if "training/passes" in ends else ""
        parts.append(f"pass {metrics['training/passes']:.2f}{of}")
    if "critic/main_chain/rewards/mean" in metrics:
        parts.append(f"reward {metrics['critic/main_chain/rewards/mean']:.3f}")
    if not math.isnan(validation):
        parts.append(f"validation {validation:.3f}")
    if "forest/num_trees" in metrics:
        states, trees = metrics["forest/active_nonroot_nodes"], metrics["forest/num_trees"]
        parts.append(f"forest {states:.0f} states in {trees:.0f} trees")
    if "teacher_worker/total_attempted" in metrics:
        done, tried = metrics["teacher_worker/total_succeeded"], metrics["teacher_worker/total_attempted"]
        parts.append(f"teacher {done:.0f} of {tried:.0f}")
    if "timing_s/step" in metrics:
        seconds = metrics["timing_s/step"]
        split = [
            f"{name} {metrics[f'timing_s/{part}'] / seconds:.0%}"
            for part, name in SHOWN_PARTS.items()
            if seconds > 0 and metrics.get(f"timing_s/{part}", 0.0) >= 0.01 * seconds
        ]
        parts.append(f"{seconds:.1f} s" + (f" ({', '.join(split)})" if split else ""))
    if seconds_left > 0:
        parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
