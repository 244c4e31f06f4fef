"""The ablations that a reader of the method asks for, on the demo's task (configs/carry_chain.py), a minute or two each.

    python -m configs.ablations                                                       questions, arms and their commands
    python -m deepgrpo.train --config=configs/ablations.py:cut_random                 one arm; --config.seed=N for further seeds
    python -m deepgrpo.telemetry.plot runs/carry_chain-forest runs/carry_chain-cut_random --out runs/cut.png

All arms sample the same number of student tokens unless they say otherwise. Once `forest` has run, arms that ask the same teacher
can share its replies: --config.teacher.replay=runs/carry_chain-forest/teacher fails where a new question comes up.
The same edits answer the same questions on real models: --config.curriculum.cut=random on configs/math_1p5b.py, and so on.
Hardware: 2 CPU cores. Time and results: docs/log.md has those arms that were run, one seed each.
"""

import dataclasses
import textwrap

import ml_collections

from configs import carry_chain
from configs.carry_chain import ARMS


@dataclasses.dataclass(frozen=True)
class Question:
    """text: what is asked. arms: names in `ARMS`, the control first. look: where the answer shows, and what else it takes."""

    text: str
    arms: tuple[str, ...]
    look: str


CURVE = "val-core/<source>/reward/mean@1 over training/student_tokens"
QUESTIONS = {
    "R1": Question(
        "Is it just more compute?",
        ("forest", "plain", "plain_4x", "plain_rloo", "plain_dynamic"),
        f"{CURVE}; then over perf/flops (summed), time and teacher/money: plain_4x spends more of each than forest",
    ),
    "R2": Question(
        "Is it just the teacher's data?",
        ("forest", "luffy", "snis", "sft", "sft_post_step"),
        f"{CURVE}; prefix_luffy/teacher_token_fraction, sft/optimizer_steps",
    ),
    "R3": Question(
        "Does the location of the cut matter?",
        ("forest", "cut_own", "cut_random", "cut_solution"),
        f"{CURVE}; prefix_any_success_rate, forest_pool/nodes_retired_this_step",
    ),
    "R4": Question(
        "How many states, how many rollouts of each?",
        ("forest", "plain", "ratio_6", "ratio_12", "ratio_25", "ratio_50", "n_4", "n_16"),
        f"{CURVE}; forest is ratio 0.75, n 8",
    ),
    "R5": Question(
        "How strict must a match be?",
        ("forest", "match_10", "match_50", "suffix_50"),
        f"{CURVE}; teacher_suffix/accepted, reject_prefix_too_short, reject_suffix_too_short",
    ),
    "R6": Question(
        "How good must the teacher be?",
        ("forest", "teacher_errs", "teacher_wrong"),
        f"{CURVE}; teacher_suffix/reject_reward_too_low. A served model, also the student's own: --config.teacher.base_url=URL",
    ),
    "R7": Question(
        "Does the pool's structure matter?",
        ("forest", "chain", "flat", "branches_inline", "branches", "suffixes", "treerl"),
        f"{CURVE}. forest and chain draw the least recently used, flat by the variance of the outcome",
    ),
    "R8": Question("When is a state mastered?", ("forest", "retire_2"), f"{CURVE}; forest_pool/nodes_retired_this_step"),
    "R9": Question(
        "Does mastery of a state carry over to its problem?",
        ("forest", "dumps"),
        "root_any_success_rate against prefix_any_success_rate over steps; dumps: rollouts/<step>.jsonl has both by problem",
    ),
    "R10": Question(
        "Does it widen what the student can do, or only sharpen it?",
        ("pass_at_k",),
        "python -m deepgrpo.evaluate --config=configs/ablations.py:pass_at_k --checkpoint=runs/carry_chain-forest, and of plain",
    ),
    "R11": Question(
        "What happens to entropy, length and truncation?",
        ("forest", "plain"),
        "actor/main_chain/entropy, response_length/main_chain/mean, rewards/truncated_negative_share",
    ),
    "R12": Question(
        "Other tasks and other families?",
        ("forest",),
        "configs/smollm2.py (Llama; sums, GSM8K), gsm8k_0p5b.py and math_1p5b.py (Qwen2.5)",
    ),
    "R13": Question(
        "Does it hold over seeds?",
        ("forest", "plain"),
        "--config.seed=0 to 4 with names of their own; launch/demo.sh --seeds 5; python -m deepgrpo.evaluate compare A0,A1 B0,B1",
    ),
    "R14": Question(
        "Is the score clean?",
        ("forest", "dumps"),
        "the run refuses shared questions; evaluation.second_grader marks all answers twice; dumps for reading prefixes",
    ),
    "R15": Question(
        "Do states of an old policy mislead?",
        ("forest", "ahead", "dumps"),
        "rollout_mismatch/*; nodes.npz of a checkpoint has each state's created_step and last outcome",
    ),
}


def get_config(arm: str = "forest") -> ml_collections.ConfigDict:
    return carry_chain.get_config(arm)


def main() -> None:
    def show(text: str, head: str, width: int = 110) -> None:
        print(textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False))

    for name, question in QUESTIONS.items():
        print(f"\n{name}  {question.text}")
        show(question.look, "    see ")
        for arm in question.arms:
            edits = ", ".join(f"{key}={value}" for key, value in ARMS[arm].items())
            show(edits or "the method as it is", f"    {arm:16} ")
    print("\neach: python -m deepgrpo.train --config=configs/ablations.py:ARM")


if __name__ == "__main__":
    main()
