"""The real training loop with an environment: states inside conversations, exact log-probs, resumption bit for bit."""

import json

from deepgrpo.environments.base import Dialect, Environment, Episode, Reply
from tests.telemetry.test_documented import documented
from tests.test_train import STEPS, assert_resumes_the_same, in_process
from tests.test_train_branches import CONTRAST, SMALL, even_digits  # noqa: F401, a fixture

AGENT = {
    "loop": "agent",
    "agent__environment": "tests.loops.test_agent_train:Sums",
    "agent__max_turns": 12,
    "agent__observation_tokens": 8,
}
SETTINGS = SMALL | CONTRAST | AGENT | {"telemetry__rollouts_every": STEPS, "validation__every": STEPS // 2}
SETTINGS |= {"curriculum__pool": "none", "teacher__enabled": False}


class Sums(Environment):
    """Answers "a+" by an operand that depends on the words before it alone."""

    dialect = Dialect(stop_texts=("+",))
    replay = "pure"
    waits = False

    def open(self, problem, seed):
        return _Sums()


class _Sums(Episode):
    def step(self, words, handed_over):
        return Reply(f"{sum(map(ord, words)) % 4 + 6}=", counts={"calls": 1}) if handed_over else Reply(None)


def test_agents_train_and_resume_bit_for_bit(student, tmp_path, even_digits):  # noqa: F811
    records = in_process(tmp_path / "whole", **SETTINGS)
    assert_resumes_the_same(tmp_path / "whole", student, **SETTINGS)
    known, steps = documented(), [record for record in records if record["step"]]
    assert len(steps) == STEPS
    names = {name for record in steps for name in record if name.startswith(("agent/", "num_turns/"))}
    assert not [name for name in names if not known.fullmatch(name)]
    for record in steps:
        assert record["agent/calls"] > 1 and record["num_turns/main_chain/mean"] > 2
        assert 0.2 < record["agent/observed_token_share"] < 0.6
        assert record["rollout_mismatch/abs_max"] <= 1e-4, "engine and learner agree on rows of several turns"
        assert record["actor/optimizer_steps"] >= 1
    run = tmp_path / "whole" / "carry_chain"
    rollouts = [json.loads(line) for line in (run / "rollouts" / f"{STEPS}.jsonl").read_text().splitlines()]
    assert records[0]["val-aux/carry_chain/num_turns/mean"] > 2
    sampled = sum(len(turn["text"]) for rollout in rollouts for turn in rollout["turns"] if turn["who"] == "student")
    observed = sum(len(turn["text"]) for rollout in rollouts for turn in rollout["turns"] if turn["who"] == "environment")
    assert sampled > 0 and observed > 0
    assert steps[-1]["training/student_tokens"] < sum(r["response_length"] for r in rollouts) * STEPS
