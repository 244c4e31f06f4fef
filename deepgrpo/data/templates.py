"""How a question becomes prompt ids. `data.template` names an entry of TEMPLATES; each is exact to the byte.

"chat", "gsm8k" and "math_boxed" go through the tokenizer's own chat template, which may add a system message of its own; the
others are written out here. "gsm8k" and "math_boxed" append the instruction that verl's converters put behind these questions, as
DEEP-GRPO does. "qwen_math", "r1" and "none" are the prompts of Dr. GRPO's evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepgrpo.data.tokenizer import Tokenizer, at_time, encode_prompt
from deepgrpo.types import Ids

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
BOXED_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_MATH_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
R1_PREAMBLE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant first "
    "thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning process is "
    "enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>."
)
SUM_EXAMPLES = (("4 + 5 + 3 = ?", "4 + 5 = 9\n9 + 3 = 12\n#### 12"), ("8 + 7 + 6 = ?", "8 + 7 = 15\n15 + 6 = 21\n#### 21"))


def messages_prompt(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer) -> Ids:
    """int32[len]: chat messages through the tokenizer's chat template, with the assistant's turn opened.

    Raises:
      ValueError: the tokenizer has no chat template, or it refuses these messages.
    """
    return encode_prompt(rendered(messages, tokenizer, add_generation_prompt=True), tokenizer)


def rendered(messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, **options: Any) -> str:
    """The text that the tokenizer's chat template makes of messages; errors: see `messages_prompt`."""
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template (chat_template in tokenizer_config.json or chat_template.jinja). "
            "Add one, or set data.template to qwen_math, qwen_chat, r1 or none"
        )
    import jinja2  # here, since only chat templates need it

    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(f"the chat template refuses messages of the roles {roles}: {type(error).__name__}: {error}") from error


def told(template: str, question: str, messages: Sequence[Mapping[str, str]] | None = None) -> str:
    """All that a prompt tells the student, without the marks of a chat: what a teacher has to know to write in its place.

    messages: the row's own, which are sent as they are.
    """
    if messages is not None:
        return "\n\n".join(message["content"] for message in messages)
    before, after = AROUND.get(template, ("", ""))
    return f"{before}{question}{after}"


def chat(question: str, tokenizer: Tokenizer) -> Ids:
    return messages_prompt([{"role": "user", "content": question}], tokenizer)


def gsm8k(question: str, tokenizer: Tokenizer) -> Ids:
    return chat(told("gsm8k", question), tokenizer)


def math_boxed(question: str, tokenizer: Tokenizer) -> Ids:
    return chat(told("math_boxed", question), tokenizer)


def qwen_math(question: str, tokenizer: Tokenizer) -> Ids:
    return encode_prompt(_turn("system", QWEN_MATH_SYSTEM) + _turn("user", question) + "<|im_start|>assistant\n", tokenizer)


def qwen_chat(question: str, tokenizer: Tokenizer) -> Ids:
    """What the chat template of the Qwen2.5-Instruct models makes of a bare question, for tokenizers that have another one."""
    return encode_prompt(_turn("system", QWEN_SYSTEM) + _turn("user", question) + "<|im_start|>assistant\n", tokenizer)


def r1(question: str, tokenizer: Tokenizer) -> Ids:
    return encode_prompt(f"{R1_PREAMBLE}\nUser: {question}\nAssistant: <think>", tokenizer)


def none(question: str, tokenizer: Tokenizer) -> Ids:
    return encode_prompt(question, tokenizer)


def few_shot_arithmetic(question: str, tokenizer: Tokenizer) -> Ids:
    """Two solved sums as earlier turns of a ChatML conversation without a system message: small models then keep the format."""
    shots = "".join(_turn("user", q) + _turn("assistant", a) for q, a in SUM_EXAMPLES)
    return encode_prompt(shots + _turn("user", question) + "<|im_start|>assistant\n", tokenizer)


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


SEARCH_PROMPT = (
    "Answer the question below. Whenever you receive new information, first reason about it between <think> and </think>. If you "
    "lack some knowledge, call the search engine with <search> query </search>; it returns the best results between "
    "<information> and </information>. Search as often as you want. As soon as no further knowledge is needed, give the answer "
    "between <answer> and </answer>, without any explanation, for example <answer> Rome </answer>. Question: {question}\n"
)

AROUND = {  # what each template says before and after the question, if it says anything
    "gsm8k": ("", f" {GSM8K_INSTRUCTION}"),
    "math_boxed": ("", f" {BOXED_INSTRUCTION}"),
    "qwen_math": (f"{QWEN_MATH_SYSTEM}\n\n", ""),
    "r1": (f"{R1_PREAMBLE}\n\n", ""),
    "few_shot_arithmetic": ("".join(f"{q}\n{a}\n\n" for q, a in SUM_EXAMPLES), ""),
}
TEMPLATES: dict[str, Callable[[str, Tokenizer], Ids]] = {
    "chat": chat,
    "gsm8k": gsm8k,
    "math_boxed": math_boxed,
    "qwen_math": qwen_math,
    "qwen_chat": qwen_chat,
    "r1": r1,
    "none": none,
    "few_shot_arithmetic": few_shot_arithmetic,
}
CHAT = ("chat", "gsm8k", "math_boxed")  # those that go through the tokenizer's own chat template
OPEN_ENDED = ("r1", "none")  # those that close no turn
TIMES = ("1987-06-05T04:32:10", "2031-12-29T23:58:57")  # two times that differ in every part

#### What else a run must know of a template


def prints_date(name: str, tokenizer: Tokenizer) -> bool:
    """Whether prompts of the template hold the date: they differ when the clock does.

    Raises:
      ValueError: the chat template refuses a question, leaves it out, or gives other prompts each time at the same time.
    """
    if name not in CHAT:
        return False
    ask = [{"role": "user", "content": "QUESTION"}]
    own = tokenizer.get_chat_template() if tokenizer.chat_template else ""  # `rendered` says that there is none
    texts = [at_time(own, time) for time in TIMES]
    made = [{rendered(ask, tokenizer, add_generation_prompt=True, chat_template=text) for _ in range(8)} for text in texts]
    if not all("QUESTION" in text for texts in made for text in texts):
        raise ValueError("the chat template leaves out what the user says")
    if max(map(len, made)) > 1:
        raise ValueError("the chat template gives another prompt each time (it draws at random), so no run could be repeated")
    return made[0] != made[1]


def turn_end(name: str, tokenizer: Tokenizer) -> tuple[str, int] | None:
    """The mark with which the template closes an assistant's turn, and the first id of it; None if there is no such mark."""
    if name in OPEN_ENDED:
        return None
    answer = {"role": "assistant", "content": "ANSWER"}
    text = rendered([{"role": "user", "content": "QUESTION"}, answer], tokenizer) if name in CHAT else _turn(**answer)
    _, found, tail = text.rpartition("ANSWER")
    ids = tokenizer(tail.strip(), add_special_tokens=False)["input_ids"] if found else []
    return (tail.strip(), int(ids[0])) if ids else None
