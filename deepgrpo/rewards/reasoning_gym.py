"""The grader of reasoning-gym's questions: the package's own, asked about the final answer that the response states."""

from deepgrpo.data import reasoning_gym
from deepgrpo.rewards.answer import Answer, own_words
from deepgrpo.rewards.qa import stated
from deepgrpo.types import Grade


def grade(answer: Answer) -> Grade:
    """Returns the score of the generator, in [0, 1]. The final answer stands between answer tags or after "Answer:"."""
    found, extra = stated(own_words(answer.response)), answer.extra
    if not found:
        return Grade(0.0, False, "unformatted")
    made = reasoning_gym.generator(extra["generator"], extra["split"], extra["count"], extra["options"])
    score = float(made.score_answer(found[-1], made[extra["item"]]))
    return Grade(score, True, "right" if score >= 1 else "wrong", found[-1][:200])
