"""What endpoints do, as found in the wild and as nobody should: behaviours of `scripted_endpoint.Endpoint`."""

import gzip
import json
import time
from collections.abc import Callable
from typing import Any

from tests.faults.scripted_endpoint import Behaviour, Exchange, right

SECRET = "sk-a-key-that-nobody-may-see"


def refuses(message: str, status: int = 400, code: Any = None, **headers: str) -> Behaviour:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return lambda exchange: exchange.say({"error": error}, status, **headers)


def choice(**parts: Any) -> Behaviour:
    return lambda exchange: exchange.say(exchange.completion(**parts))


def message(**parts: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": None} | parts}


def body(text: str | bytes, status: int = 200, **headers: str) -> Behaviour:
    return lambda exchange: exchange.say(text, status, **headers)


def edited(edit: Callable[[dict[str, Any]], Any]) -> Behaviour:
    """A whole completion after `edit`, which changes it or returns another."""

    def behave(exchange: Exchange) -> None:
        completion = exchange.completion()
        exchange.say(edit(completion) or completion)

    return behave


def usage(value: Any) -> Behaviour:
    """value: the JSON text of `usage`."""

    def behave(exchange: Exchange) -> None:
        exchange.say(json.dumps(exchange.completion() | {"usage": "HERE"}).replace('"HERE"', value))

    return behave


def silent(exchange: Exchange) -> None:
    exchange.server.endpoint.closing.wait(60.0)
    exchange.close_connection = True


def hangs_up(exchange: Exchange) -> None:
    exchange.close_connection = True


def drips(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.send_header("Content-Length", "1000000")
    exchange.end_headers()
    while not exchange.server.endpoint.closing.wait(0.1):
        exchange.wfile.write(b" ")
        exchange.wfile.flush()


def endless(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.send_header("Transfer-Encoding", "chunked")
    exchange.end_headers()
    while not exchange.server.endpoint.closing.is_set():
        exchange.wfile.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")


def breaks_off(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.send_header("Content-Length", "100000")
    exchange.end_headers()
    exchange.wfile.write(b'{"choices": [')
    exchange.close_connection = True


def no_http(exchange: Exchange) -> None:
    exchange.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    exchange.close_connection = True


def inflates(exchange: Exchange) -> None:
    exchange.say(BOMB, Content_Encoding="gzip")


BOMB = gzip.compress(b" " * (24 << 20), 1)
KWARGS = "Unrecognized request argument supplied: chat_template_kwargs"
DEEP = "[" * 200_000
LACKING = "a reply without content"
# Of every request alike: name -> (behaviour, metric that counts it, part of what the log says, whether the budget is charged)
COMMON: dict[str, tuple[Behaviour, str, str, bool]] = {
    "chat_template_kwargs": (refuses(KWARGS), "http_refused", "teacher.enable_thinking=unset", False),
    "temperature": (refuses("Unsupported value: 'temperature'"), "http_refused", "teacher.temperatures", False),
    "context": (refuses("maximum context length is 512 tokens"), "http_refused", "teacher.max_tokens", False),
    "too large": (refuses("Payload Too Large", 413), "http_refused", "Payload Too Large", False),
    "unprocessable": (body('{"detail": [{"loc": ["body"], "msg": "Extra"}]}', 422), "http_refused", "Extra", False),
    "not found": (refuses("The model `m` does not exist", 404), "http_access", "teacher.model", False),
    "denied": (refuses(f"Incorrect API key provided: {SECRET}", 401), "http_access", "OPENAI_API_KEY", False),
    "forbidden": (body(b"<html>" + b"no" * 100_000, 403, Content_Type="text/html"), "http_access", "HTTP 403", False),
    "payment": (refuses("Insufficient credits", 402), "http_access", "Insufficient credits", False),
    "quota": (refuses("You exceeded", 429, "insufficient_quota"), "http_access", "insufficient_quota", False),
    "redirect": (body("", 307, Location="http://127.0.0.1:9/v1"), "http_access", "redirected to http://127.0.0.1:9", False),
    "slow down": (refuses("Rate limit reached", 429, Retry_After="0.01"), "http_rate_limit", "max_concurrent", False),
    "never again": (refuses("Rate limit reached", 429, Retry_After="1e300"), "http_rate_limit", "Rate limit", False),
    "server error": (refuses("CUDA out of memory", 500), "http_server", "CUDA out of memory", False),
    "loading": (refuses("Loading model", 503, Retry_After="0"), "http_server", "Loading model", False),
    "error in a 200": (
        body('{"error": {"message": "Provider returned", "code": 502}}'),
        "http_server",
        "Provider returned",
        True,
    ),
    "refusal in a 200": (body('{"error": {"message": "top_p", "code": 400}}'), "http_refused", "top_p", True),
    "old error in a 200": (body('{"object": "error", "message": "gone", "code": 500}'), "http_server", "gone", True),
    "silent": (silent, "http_timeout", "no complete reply", True),
    "drips": (drips, "http_timeout", "no complete reply", True),
    "hangs up": (hangs_up, "http_transport", "teacher.base_url", False),
    "no HTTP": (no_http, "http_transport", "teacher.base_url", False),
    "endless": (endless, "http_junk", "MiB", True),
    "gzip bomb": (inflates, "http_junk", "MiB", True),
    "broken gzip": (body(b"\x1f\x8bjunk", Content_Encoding="gzip"), "http_junk", "cannot be decoded", True),
    "breaks off": (breaks_off, "http_junk", "broke off", True),
    "deep": (body(DEEP), "http_junk", "RecursionError", True),
    "a page": (body("<!doctype html><title>Portal login</title>", Content_Type="text/html"), "http_junk", "Portal login", True),
    "nothing": (body(""), "http_junk", "not a chat completion", True),
    "no UTF-8": (body(b'{"choices": "\xff\xfe\xfa"}'), "http_junk", "cannot be decoded", True),
    "a list": (body("[1, 2]"), "http_junk", "not a chat completion", True),
    "a number": (body("1e999"), "http_junk", "not a chat completion", True),
    "no choices": (edited(lambda completion: completion.update(choices=[])), "http_junk", "IndexError", True),
    "a stream": (body('data: {"choices": []}\n\ndata: [DONE]\n\n'), "http_junk", "data: ", True),
    "content is an object": (choice(**message(content={"a": 1})), "http_junk", "content is a dict", True),
    "broken by the engine": (choice(finish_reason="abort"), "http_server", "abort", True),
    "cut": (choice(finish_reason="length"), "http_cut", "teacher.max_tokens", True),
    "cut, by another word": (choice(finish_reason={"type": "MAX_TOKENS"}), "http_cut", "teacher.max_tokens", True),
    "filtered": (choice(finish_reason="content_filter"), "http_filtered", "teacher.model", True),
    "refusal": (choice(**message(refusal="I cannot help.")), "http_filtered", "teacher.model", True),
    "null": (choice(**message()), "http_empty", LACKING, True),
    "only thoughts": (choice(**message(reasoning_content="hm")), "http_empty", "teacher.enable_thinking", True),
    "a tool": (choice(**message(tool_calls=[{"id": "1"}]), finish_reason="tool_calls"), "http_empty", LACKING, True),
    "spaces": (choice(**message(content=" \n")), "http_empty", LACKING, True),
}


def parts(completion: dict[str, Any]) -> None:
    reply = completion["choices"][0]["message"]
    reply["content"] = [{"type": "thinking", "thinking": []}, {"type": "text", "text": reply["content"]}]


def half_a_pair(completion: dict[str, Any]) -> None:
    reply = completion["choices"][0]["message"]
    reply["content"] = reply["content"].replace("missing", "missing \ud83d")


# What is odd but answers: name -> (behaviour, part of what the log says or "")
ODD: dict[str, tuple[Behaviour, str]] = {
    "usage negative": (usage('{"prompt_tokens": -500, "completion_tokens": -9}'), "`usage`"),
    "usage zero": (usage('{"prompt_tokens": 0, "completion_tokens": 0}'), "`usage`"),
    "usage one": (usage('{"prompt_tokens": 1, "completion_tokens": 1}'), "`usage`"),
    "usage infinite": (usage('{"prompt_tokens": 1e999, "completion_tokens": NaN}'), "`usage`"),
    "usage huge": (usage('{"prompt_tokens": 1' + "0" * 400 + ', "completion_tokens": 5}'), "`usage`"),
    "usage of words": (usage('{"prompt_tokens": "many", "completion_tokens": null}'), "`usage`"),
    "usage a list": (usage("[3]"), "`usage`"),
    "no usage": (usage("null"), "`usage`"),
    "several choices": (edited(lambda completion: completion["choices"].append({"index": 1})), "several choices"),
    "parts": (edited(parts), ""),
    "byte order mark": (lambda exchange: exchange.say(b"\xef\xbb\xbf" + json.dumps(exchange.completion()).encode()), ""),
    "UTF-16": (lambda exchange: exchange.say(json.dumps(exchange.completion()).encode("utf-16")), ""),
    "gzip": (lambda e: e.say(gzip.compress(json.dumps(e.completion()).encode()), Content_Encoding="gzip"), ""),
    "another type": (lambda exchange: exchange.say(exchange.completion(), Content_Type="text/plain; charset=utf-8"), ""),
    "half a character": (edited(half_a_pair), ""),
    "null finish": (choice(finish_reason=None), ""),
    "slow": (lambda exchange: (time.sleep(0.05), right(exchange)), ""),
    "half fails": (lambda e: right(e) if e.ordinal % 2 else e.say({"error": {"message": "busy"}}, 503), ""),
}
