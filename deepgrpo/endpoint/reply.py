"""What a chat completion says: the text, whether it is whole, and what it cost. All replies are read here."""

import json
import re
from collections.abc import Mapping
from typing import Any

from deepgrpo.config.errors import redact
from deepgrpo.endpoint.errors import failure, words

# What is kept of a reply: text, prompt_tokens, completion_tokens, latency, and "lacks" where it is not whole.
Payload = dict[str, Any]

MOST_TOKENS = 4 << 20  # of one request, if nothing else bounds it
BYTES_A_TOKEN = 16  # no text has longer tokens on the average: fewer were not reported in earnest
SPARE = 64  # tokens that an endpoint may count beyond the limit that it was sent
LACKS = {  # what a reply that is not whole lacks its end or its content for -> how its finish reason reads
    "cut": re.compile(r"length|max_?tokens|model_context", re.IGNORECASE),
    "filtered": re.compile(r"filter|safety|recitation|refus|block|prohibited|sensitive", re.IGNORECASE),
    "broken": re.compile(r"error|abort|cancel|insufficient", re.IGNORECASE),
}


def read(body: str, request: Mapping[str, Any]) -> tuple[Payload, list[str]]:
    """Returns what is kept of a response body, and counters of what was odd about it.

    payload["lacks"]: "cut" (the reply hit a limit), "filtered" (a filter or the model refused), "empty" (no content).

    Raises:
      EndpointError: the body says that the request failed. Any other exception: it is not a chat completion.
    """
    response = json.loads(body)
    choices = response.get("choices")
    error = response.get("error") or (response if response.get("object") == "error" else None)
    if not choices and error:
        raise _reported(error)
    choice = choices[0]
    message, odd = choice["message"], []
    text, thoughts = _text(message.get("content")), _text(message.get("reasoning_content") or message.get("reasoning"))
    finish = json.dumps(choice.get("finish_reason"))
    lacks = next((lack for lack, pattern in LACKS.items() if pattern.search(finish)), "")
    if lacks == "broken":
        raise _reported(choice.get("error") or f"the reply ended with {finish}")
    if message.get("refusal") and not text:
        lacks = "filtered"
    lacks = lacks or ("" if text.strip() else "empty")
    if len(choices) > 1:
        odd.append("http_many_choices")
    usage, limit = response.get("usage"), request.get("max_tokens")
    prompt, believed = _tokens(usage, "prompt_tokens", prompt_text(request), None)
    completion, believed_too = _tokens(usage, "completion_tokens", thoughts + text, limit)
    if not (believed and believed_too):
        odd.append("http_no_usage")
    payload = {"text": redact(text), "prompt_tokens": prompt, "completion_tokens": completion}
    return payload | ({"lacks": lacks} if lacks else {}), odd + ([f"http_{lacks}"] if lacks else [])


def prompt_text(request: Mapping[str, Any]) -> str:
    return "".join(message["content"] for message in request["messages"])


def estimate(text: str) -> int:
    """Tokens of a text, roughly and rather too many: one for three bytes."""
    return len(text.encode("utf-8", "replace")) // 3 + 1


def _reported(error: Any) -> Exception:
    """The failure that a body with status 200 reports; gateways put the status of theirs into `code`."""
    code = error.get("code") if isinstance(error, dict) else None
    status = int(code) if str(code).isdecimal() and 400 <= int(code) < 600 else 502
    return failure(status, f"an error in place of a reply: {words(error)}")


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts. Half a surrogate pair becomes a replacement character."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str | None):
        raise TypeError(f"content is a {type(content).__name__}")
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _tokens(usage: Any, kind: str, text: str, limit: int | None) -> tuple[int, bool]:
    """Returns (tokens to charge, whether the endpoint's own number was believed); if not, an estimate from the text.

    limit: of the reply's tokens, as it was sent.
    """
    told = usage.get(kind) if isinstance(usage, dict) else None
    if isinstance(told, float) and told.is_integer():
        told = int(told)
    if type(told) is int and -(-len(text.encode("utf-8", "replace")) // BYTES_A_TOKEN) <= told <= (limit or MOST_TOKENS) + SPARE:
        return told, True
    over = type(told) is int and limit is not None and told > limit
    return max(estimate(text), limit if over else 0), False
