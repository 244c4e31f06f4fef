"""The client of an endpoint, from its section of the configuration: the same one for the check at the start and for the run."""

import json
from typing import Any

import ml_collections

from deepgrpo.endpoint.cache import ReplyCache
from deepgrpo.endpoint.client import Client

KEYS = (
    *("api_key_env", "temperatures", "attempts", "timeout", "deadline", "max_tokens", "max_concurrent"),
    *("token_budget", "money_budget", "prompt_price", "completion_price", "breaker_failures", "breaker_seconds"),
)
TRUE, FALSE, UNSET = {"1", "true", "yes", "y", "on"}, {"0", "false", "no", "n", "off"}, {"", "null", "none", "unset"}
JUDGE_ROOM = 8192  # tokens of a judge's reply
TEACHER_ROOM, THINKING_ROOM = 4, 32  # times the student's context: an account of the mistake and the solution; thoughts, too


def open_client(
    config: ml_collections.ConfigDict, name: str, cache: ReplyCache | None = None, base_url: str = "", model: str = ""
) -> Client:
    """The client of the section `name`: teacher or judge. base_url, model: in place of the section's."""
    section = config[name]
    if name == "teacher":
        thinks = section.enable_thinking.strip().lower() not in FALSE
        room = config.rollout.max_model_len * (THINKING_ROOM if thinks else TEACHER_ROOM)
    else:
        room = JUDGE_ROOM
    return Client(
        base_url=base_url or section.base_url,
        model=model or section.model,
        extra_body=extra_body(section.enable_thinking),
        cache=cache,
        strict_reference=config.strict_reference and name == "teacher",
        seed=config.seed,
        name=name,
        room=room,
        **{key: section[key] for key in KEYS},
    )


def extra_body(enable_thinking: str, chat_template_kwargs: str = "") -> dict[str, Any] | None:
    """The `extra_body` that switches a served model's thinking.

    Args:
      enable_thinking: true | false (and their usual synonyms, any case) or unset ("", null, none).
      chat_template_kwargs: JSON object sent instead, if set.

    Raises:
      ValueError: neither a boolean nor unset, or not a JSON object.
    """
    if chat_template_kwargs.strip().lower() not in UNSET:
        kwargs = json.loads(chat_template_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError(f"chat_template_kwargs must be a JSON object, got {chat_template_kwargs!r}")
        return {"chat_template_kwargs": kwargs}
    word = enable_thinking.strip().lower()
    if word in UNSET:
        return None
    if word not in TRUE | FALSE:
        raise ValueError(f"enable_thinking must be true, false or unset, got {enable_thinking!r}")
    return {"chat_template_kwargs": {"enable_thinking": word in TRUE}}
