"""Answers that were judged by hand before any grader saw them (out_of_sample.jsonl; `set` says which came when).

The figures of the first look, before a verdict of the set could change a grader, are README's; this holds what is reached.
"""

import collections
import json
import pathlib

from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.service import GradingService

PATH = pathlib.Path(__file__).with_name("out_of_sample.jsonl")


def test_agreement_with_a_person(record_property):
    rows = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
    with GradingService(workers=2, deadline=60.0, sources={row["source"] for row in rows}) as service:
        answers = [Answer(r["source"], r.get("question", ""), "", r["response"], "stop", r["ground_truth"]) for r in rows]
        rewards = [future.result(600).reward for future in [service.submit(answer) for answer in answers]]
    counts, differ = collections.defaultdict(collections.Counter), []
    for row, reward in zip(rows, rewards, strict=True):
        right = reward is not None and reward >= 0.5
        outcome = "agree" if reward is not None and right == row["label"] else "accept" if right else "refusal"
        counts[f"set {row.get('set', 1)}"].update([outcome, "answers"])
        differ += [row["response"][-50:]] * (outcome != "agree")
    total = counts["all"] = sum(counts.values(), collections.Counter())
    lines = [
        f"{name}: {row['answers']} answers, agreement {row['agree'] / row['answers']:.1%}, {row['accept']} wrongly accepted, "
        f"{row['refusal']} wrongly refused"
        for name, row in counts.items()
    ]
    record_property("figures", "\n".join([*lines, *map(repr, differ)]))
    assert total["accept"] == 0
    assert total["agree"] / total["answers"] >= 0.98
