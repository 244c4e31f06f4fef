"""Held-out questions in a training set: the same in another spelling, reworded, contained; and what is another problem."""

import pytest

from deepgrpo.data.contamination import Overlap, overlap, words

ELLIPSE = "An ellipse in the first quadrant is tangent to both axes. One focus is at $(3,7)$, and the other focus is at $(d, 7)$."


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("Let $a_1,$ $a_2,$ $\\dots$ be $\\dfrac{1}{2}$.", "Let $a_{1}, a_{2}, \\ldots$ be\n\\frac{1}{2} ."),
        ("He pays $1,000 for 5 robes.", "he pays  \\$1000 for 5 robes!"),
        ("Janet\u2019s ducks lay 3 \u2212 1 eggs", "Janet's ducks lay 3 - 1 eggs"),
        ("Compute \\[x^2 \\cdot 3 \\leq 4.\\]", "Compute $x^{2}\\times3\\le 4$."),
        ("What is 2+2? Let's think step by step and output the final answer within \\boxed{}.", "What is 2 + 2?"),
        ("What is 2+2? Please reason step by step, and put the answer last", "What is 2 + 2?"),
    ],
)
def test_spelling_does_not_matter(train, held_out):
    assert overlap([train], [held_out]) == Overlap(exact=((0, 0),))


@pytest.mark.parametrize(
    ("train", "held_out"), [("12 + 34 = ?", "12 - 34 = ?"), ("4 + 5 + 3", "3 + 4 + 5"), ("x^23", "x^2 \\cdot 3")]
)
def test_operators_and_order_do(train, held_out):
    assert overlap([train], [held_out]) == Overlap() and words(train) != words(held_out)


def test_reworded_contained_and_similar_questions():
    train = [f"{ELLIPSE} Compute $d$.", "another question"]
    found = overlap(train, [f"If {ELLIPSE.lower()} then find $d$.", f"Compute $d$. {ELLIPSE}"])
    assert found.near == ((0, 0), (1, 0)) and found.found == found.near
    wrapped = f"Solve this as well as you can, dear machine. {ELLIPSE} Compute $d$. Say it in one number, on the last line."
    assert overlap([wrapped], [train[0]]).near == ((0, 0),) == overlap([train[0]], [wrapped]).near
    assert overlap([train[0].replace("(3,7)", "(4,7)")], [train[0]]) == Overlap(similar=((0, 0),))
    assert overlap([train[0].replace("ellipse", "circle")], [train[0]]) == Overlap(similar=((0, 0),))


def test_a_prompt_that_all_questions_share_is_not_an_overlap():
    prompt = "Answer the question below. First reason between tags, then search as often as you want, and end with the answer."
    train = [f"{prompt} Question: who wrote book number {i}?" for i in range(40)]
    held_out = [f"{prompt} Question: who wrote poem number {i}?" for i in range(40)]
    assert overlap(train, held_out) == Overlap()
    assert len(overlap(train, train[:5]).exact) == 5


def test_each_held_out_question_is_reported_once_with_the_first_double():
    assert overlap(["a b", "c d", "A B"], ["c d", "a b", "a, b", "e"]).exact == ((0, 1), (1, 0), (2, 0))
    assert overlap([], ["a"]) == overlap(["a"], []) == overlap([""], [""]) == Overlap()


def test_carry_chains_of_the_same_digits_are_different():
    assert overlap(["57a6b9c8d7e9f6g8h7i9j6=?"], ["57a9b6c8d7e9f6g7h8i6j9=?"]).found == ()


@pytest.mark.parametrize(
    ("train", "held_out", "counts"),
    [
        ("gsm8k_train", "gsm8k_test", (0, 0)),
        ("gsm8k_drgrpo_8792", "gsm8k_test", (1319, 0)),
        ("math_lvl3to5_8k_train", "math500", (0, 1)),
        ("math_lvl3to5_8k_train", "olympiad_bench", (5, 1)),
    ],
)
def test_real_sets(data_folder, train, held_out, counts):
    from deepgrpo.data import tables

    questions = [
        [row.get("problem", row.get("question")) for row in tables.read(str(data_folder / f"{name}.jsonl"), {})]
        for name in (train, held_out)
    ]
    found = overlap(*questions)
    assert (len(found.exact), len(found.near)) == counts
