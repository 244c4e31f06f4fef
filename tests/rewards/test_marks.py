"""Where a final answer stands: what a locked prefix may not hold; a cut between prefix and response changes no verdict."""

import pytest

from deepgrpo.rewards import grade as graders
from deepgrpo.rewards.answer import Answer

STATED = {  # that a prefix with this states an answer, or begins to
    "GSM8K": [
        *("#### 5", "so 12\n####", "The answer is 5", "answer: 12", "**Answer:** $12", "\\boxed{4", "\\fbox{3}"),
        *("<answer>4", "### 42", "Answer: 4 hours", "the answer is \\$4", "The answer is:", "The answer is \\"),
        *("the answer is \u22125",),
    ],
    "MATH": [
        *("So the final answer is 13.", "\\boxed{", "\\fbox{2", "The answer is $\\frac12$", "the answer is (B)."),
        *("#### 13", "Answer: $x=2$", "The final answer is even.", "the answer is\n$$5$$", "answer is \\text{(B)}"),
        *("\\boxed 5", "<answer>", "the answer is therefore 13 and", "The answer is \\{1, 2\\}"),
        *("the answer is $x^2 - 3y$", "answer is [2, 5)"),
    ],
    "hybridqa": ["<Answer>Oslo", "Answer: Oslo", "The answer is Oslo", "< answer"],
    "hotpotqa": ["<answer>", "</think><answer> Oslo"],
}
OPEN = {  # that nothing is stated yet
    "GSM8K": [
        *("### Step 1", "### Step 1: 3 + 4 = 7", "the answer: we add 3", "#### Step 2\n", "# 5", "### 1. Add 3 and 4"),
        *("answers are", "To find the answer, we", "the answer is not 5", "the answer is found by dividing 12 by 4"),
        *("### Calculation of 3 days",),
    ],
    "MATH": [
        *("### Step 1", "the answer: we add", "the answer is an integer", "The answer is not 5", "\\boxempty"),
        *("### 2. Solve for $x$", "the answer in the form $\\frac{m}{n}$", "the answer is $m+n$, so we"),
        *("so the answer is at most 7", "Let $x$ be the answer.", "the answer is a 5-digit number"),
        *("the answer is the sum of 3 and 5", "answer choices: ", "the answer is A + B where"),
    ],
    "hybridqa": ["To answer this, look at", "Oslo is first"],
    "hotpotqa": ["<think>the answer is Oslo"],
}


@pytest.mark.parametrize(("texts", "leaks"), [(STATED, True), (OPEN, False)], ids=["stated", "open"])
def test_a_leak_is_a_mark_of_a_final_answer_and_nothing_else(texts, leaks):
    for source, prefixes in texts.items():
        assert [t for t in prefixes if graders.leaks_answer(source, t) != leaks] == [], source


@pytest.mark.parametrize(
    ("source", "text", "key"),
    [
        ("MATH", "We get x. The answer is \\boxed{42}", ["42"]),
        ("MATH", "So, $x = 3$.\n\n\\boxed{\\frac{1}{2}}", ["0.5"]),
        ("MATH", "thus \\boxed 7", ["7"]),
        ("MATH", "thus \\fbox{7}", ["7"]),
        ("MATH", "roots: $\\boxed{1}$ and $\\boxed{-2}$.", ["1,-2"]),
        ("MATH", "wrong: \\boxed{41}", ["42"]),
        ("GSM8K", "3 + 4 = 7\n#### 42", "42"),
        ("GSM8K", "The answer is 42. That is 2 a day", "42"),
        ("GSM8K", "3 + 4 = 1,742", "1742"),
        ("GSM8K", "the balance is -25.50", "-25.5"),
        ("GSM8K", "Answer: **42**", "42"),
        ("GSM8K", "#### 41", "42"),
        ("hybridqa", "I think.\n<Answer>Oslo</Answer>", "Oslo"),
        ("hybridqa", "**Answer:** Oslo", "Oslo"),
        ("hotpotqa", "<think>x</think><answer>Danube</answer>", ["Danube"]),
        ("hotpotqa", "<think>x</think><answer>Rhine</answer>", ["Danube"]),
        ("DABench", "done <Answer>@m[1.5]</Answer>", [["m", "1.5"]]),
        ("DeepScaleR", "The answer is $\\frac12$.", ["0.5"]),
    ],
)
def test_a_cut_anywhere_changes_no_verdict(source, text, key):
    def reward(cut):
        return graders.grade(Answer(source, "", text[:cut], text[cut:], "stop", key, validation=True)).reward

    whole = reward(0)
    cuts = [cut for cut in range(1, len(text)) if not graders.leaks_answer(source, text[:cut])]
    assert len(cuts) > 2 and [cut for cut in cuts if reward(cut) != whole] == []
    assert all(reward(cut) <= whole for cut in range(len(text)))
    assert reward(len(text)) == 0  # what the prefix says earns nothing


@pytest.mark.parametrize("source", ["MATH", "GSM8K", "hotpotqa", "hybridqa", "DABench"])
def test_two_final_answers_must_agree(source):
    key, right, wrong = {
        "MATH": (["5"], "5", "6"),
        "GSM8K": ("5", "5", "6"),
        "hotpotqa": (["Danube"], "the Danube", "Rhine"),
        "hybridqa": ("Oslo", "oslo", "Bergen"),
        "DABench": ([["m", "1.5"]], "@m[1.50]", "@m[2]"),
    }[source]
    rubric = graders.Rubric(extract="answer_tag_lenient")
    for answers, reward in (((right, right), 1.0), ((wrong, right), 0.0), ((right, wrong), 0.0)):
        text = "<think>x</think>" + " no, ".join(f"<answer>{one}</answer>" for one in answers)
        assert graders.grade(Answer(source, "", "", text, "stop", key, validation=True), rubric).reward == reward
