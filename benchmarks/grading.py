"""Speed of the grading service: ordinary answers a second, what hostile ones cost, and whether verdicts are worth remembering.

    python -m benchmarks.grading [--workers 2] [--answers 4000] [--deadline 5]
    python -m benchmarks.grading --agreement     # with a person, on tests/rewards/out_of_sample.jsonl

Ordinary answers are responses of a few sentences with a boxed result (right, wrong, or spelled otherwise) or a GSM8K solution;
with `repeated`, each comes eight times, as the rollouts of one prompt do. Hostile ones are towers, sums, deep nesting, long runs
and unreadable bytes, one at a time: `slowest` is the longest wait. CPU seconds are the workers', their start (about 1 s each)
included. Needs no accelerator and no data. The reference and math-verify alone are measured on the mathematics of the file.
"""

import argparse
import json
import pathlib
import random
import resource
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.reward import Rubric
from deepgrpo.rewards.service import GradingService

SPELLINGS = (  # key, answers; {n} is a number that changes
    ("{n}", ("{n}", "x = {n}", "{n}.0", "{n}1", "\\text{{{n}}}")),
    ("\\frac{{{n}}}{{3}}", ("\\dfrac{{{n}}}{{3}}", "{n}/3", "\\frac{{{n}}}{{4}}")),
    ("{n}\\sqrt{{13}}", ("{n}\\sqrt{{13}}", "\\sqrt{{13}}\\cdot {n}", "{n}\\sqrt{{14}}")),
    ("x^2 - {n}x + 1", ("1 + x^2 - {n}x", "x^2 + {n}x + 1", "x(x - {n}) + 1")),
    ("({n}, \\infty)", ("x > {n}", "[{n}, \\infty)", "({n}, \\infty)")),
    ("1, -{n}", ("-{n}, 1", "x = 1 \\text{{ or }} x = -{n}", "1, {n}")),
    ("\\begin{{pmatrix}} {n} \\\\ 1/3 \\end{{pmatrix}}", ("\\begin{{bmatrix}} {n} \\\\ \\frac13 \\end{{bmatrix}}", "({n}, 1/3)")),
)
HOSTILE = (
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "10000000!",
    "\\binom{100000000}{50000000}",
    "\\sum_{k=1}^{1000000000}\\frac{1}{k}",
    "\\int_0^1 x^{x^{x}} dx",
    "(x+y+1)**600-(x+y)**600",
    "1+" * 4000 + "1",
    "(" * 5000 + "5",
    "\\sqrt{" * 900 + "2" + "}" * 900,
    "\\text{" * 1400 + "5" + "}" * 1400,
    "7" * 9000,
    "ab" * 4000,
    ",".join(map(str, range(2000))),
    "\u202e\x00\ud7ff" * 500,
)


def ordinary(count: int, repeats: int, noise: random.Random) -> list[Answer]:
    made: list[Answer] = []
    while len(made) < count:
        n = noise.randrange(2, 999)
        if noise.random() < 0.3:
            answer = Answer(
                "GSM8K", "How many?", "", f"3 * {n} = {3 * n}, so they have {3 * n}.\n#### {3 * n}", "stop", str(3 * n)
            )
        else:
            key, answers = noise.choice(SPELLINGS)
            said = noise.choice(answers).format(n=n)
            text = f"We compute step by step. {'It follows that ' * 30}The answer is $\\boxed{{{said}}}$."
            answer = Answer("MATH", "What is it?", "", text, "stop", [key.format(n=n)])
        made += [answer] * repeats
    return made[:count]


def measured(service: GradingService, answers: Sequence[Answer]) -> tuple[float, list]:
    start = time.perf_counter()
    grades = [future.result(600) for future in [service.submit(answer) for answer in answers]]
    return time.perf_counter() - start, grades


def agreement(workers: int) -> None:
    """Prints how often each way of grading agrees with the person who judged the answers."""
    text = (pathlib.Path(__file__).parents[1] / "tests/rewards/out_of_sample.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    mathematics = [row for row in rows if row["source"] in ("MATH", "AIME24", "AMC", "Minerva", "OlympiadBench", "GSM8K")]
    table = Table("grader", "answers", "agreement", "wrongly accepted", "wrongly refused")
    for grader, of in (("typed", rows), ("typed", mathematics), ("compat_fast", mathematics), ("math-verify", mathematics)):
        verdicts = [by_math_verify(row) for row in of] if grader == "math-verify" else by_service(grader, of, workers)
        right = [row["label"] == 1 for row in of]
        pairs = list(zip(verdicts, right, strict=True))
        share = f"{sum(v == r for v, r in pairs) / len(of):.1%}"
        table.add_row(
            grader, str(len(of)), share, str(sum(v and not r for v, r in pairs)), str(sum(r and not v for v, r in pairs))
        )
    Console(width=110).print(table)


def by_service(grader: str, rows: Sequence[dict], workers: int) -> list[bool]:
    answers = []
    for row in rows:
        mark = '"####"' if row["source"] == "GSM8K" else "\\boxed{}"  # the reference reads the prompt too
        asked = f"{row.get('question', 'What is it?')} Explain briefly and put the result after {mark}."
        prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        fields = (row["source"], asked, "", row["response"], "stop", row["ground_truth"])
        answers.append(Answer(*fields, prompt=prompt, ending="<|im_end|>"))
    with GradingService(workers, 20.0, {row["source"] for row in rows}, Rubric(grader=grader)) as service:
        return [(grade.reward or 0) >= 0.5 for grade in measured(service, answers)[1]]


def by_math_verify(row: dict) -> bool:
    from math_verify import parse, verify

    keys = row["ground_truth"] if isinstance(row["ground_truth"], list) else [row["ground_truth"]]
    found = parse(row["response"])
    return any(verify(parse(key if key.startswith("$") else f"${key.strip()}$"), found) for key in keys)


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4000)
    parser.add_argument("--deadline", type=float, default=5.0)
    parser.add_argument("--agreement", action="store_true")
    args = parser.parse_args()
    if args.agreement:
        return agreement(args.workers)
    table = Table("grader", "answers", "seconds", "answers/s", "worker CPU s", "slowest s", "no verdict")
    for grader in ("typed", "compat_fast", "compat_full"):
        for name, repeats in (("different", 1), ("repeated", 8)):
            before = children_cpu()
            with GradingService(args.workers, args.deadline, ["MATH", "GSM8K"], Rubric(grader=grader)) as service:
                answers = ordinary(args.answers if grader == "typed" else args.answers // 4, repeats, random.Random(0))
                seconds, grades = measured(service, answers)
            lost = sum(grade.reward is None for grade in grades)
            cpu = children_cpu() - before  # includes what the workers took to start
            rate = f"{len(answers) / seconds:.0f}"
            table.add_row(f"{grader}, {name}", str(len(answers)), f"{seconds:.1f}", rate, f"{cpu:.1f}", "", str(lost))
        before = children_cpu()
        with GradingService(args.workers, args.deadline, ["MATH"], Rubric(grader=grader)) as service:
            waits, lost = [], 0
            for text in HOSTILE:
                answer = Answer("MATH", "", "", f"\\boxed{{{text}}}", "stop", ["\\frac{14}{3}"])
                seconds, (grade,) = measured(service, [answer])
                waits.append(seconds)
                lost += grade.reward is None
        row = (f"{sum(waits):.1f}", "", f"{children_cpu() - before:.1f}", f"{max(waits):.2f}", str(lost))
        table.add_row(f"{grader}, hostile", str(len(HOSTILE)), *row)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
