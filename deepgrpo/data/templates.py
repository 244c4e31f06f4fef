"""How a question becomes prompt ids. `data.template` names an entry of TEMPLATES; each is exact to the byte.

"chat", "gsm8k" and "math_boxed" go through the tokenizer's own chat template, which may add a system message of its own; the
others are written out here. "gsm8k" and "math_boxed" append the instruction that verl's converters put behind these questions, as
DEEP-GRPO does. "qwen_math", "r1" and "none" are the prompts of Dr. GRPO's evaluation.
"""

from collections.abc import Callable, Mapping, Sequence

from deepgrpo.data.tokenizer import Tokenizer, encode_prompt
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
      ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template (chat_template in tokenizer_config.json or chat_template.jinja). "
            "Add one, or set data.template to qwen_math, qwen_chat, r1 or none"
        )
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return encode_prompt(text, tokenizer)


def chat(question: str, tokenizer: Tokenizer) -> Ids:
    return messages_prompt([{"role": "user", "content": question}], tokenizer)


def gsm8k(question: str, tokenizer: Tokenizer) -> Ids:
    return chat(f"{question} {GSM8K_INSTRUCTION}", tokenizer)


def math_boxed(question: str, tokenizer: Tokenizer) -> Ids:
    return chat(f"{question} {BOXED_INSTRUCTION}", tokenizer)


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
