"""What a person watches: one live line, or one plain line a step where there is no terminal. And the clock of a step's parts."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import rich.console
import rich.live
import rich.text

from deepgrpo.telemetry import terminal, waits
from deepgrpo.telemetry.log import no_end

STAGES = {  # what a part waits for, for the watchdog's line
    "gen": "rollouts and their verdicts",
    "teacher_wait": "the teacher's corrections (teacher.synchronous)",
    "publish": "the engine, to take the new weights",
    "testing": "validation",
    "save_checkpoint": "the checkpoint, to be written",
}
SHOWN_PARTS = {"gen": "rollouts", "update_actor": "update", "teacher_wait": "teacher", "testing": "validation"}


class Timer:
    """Seconds spent in the named parts of a step, as `timing_s/<part>`; parts may nest, each counts its own whole time.
    The log says which part takes long (telemetry/waits.py)."""

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
        self._console = console or terminal.Console()
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
            line = describe(step, self._ends, known, self._validation, self.seconds_left(known))
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


def told(position: Mapping[str, float]) -> str:
    """Where a run is, of its `training/*` metrics."""
    step, passes, tokens = (position[f"training/{name}"] for name in ("global_step", "passes", "student_tokens"))
    return f"step {step}, {passes:.2f} passes over the data, {tokens} student tokens"


def describe(step: int, ends: Mapping[str, float], metrics: Mapping[str, float], validation: float, seconds_left: float) -> str:
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
