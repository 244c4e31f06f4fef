"""POST /deepgrpo/generate: what vLLM's own /inference/v1/generate does, answered in plain lists.

vLLM's route makes two validated objects of every token's log-prob and writes 150 bytes for it; with a small model that takes a
quarter of the time. Request: {"token_ids", "cache_salt", "sampling_params"}, the last as vLLM's
`SamplingParams`, with logprobs 0; logit_bias has JSON's keys, which are text. Answer: {"choices": [{"index", "token_ids",
"logprobs", "finish_reason", "weight_versions": [[version, start, end], ...]}], "cached_tokens"}; logprobs[i] is that of
token_ids[i].
"""

import asyncio
import dataclasses
import json
import uuid

from starlette.responses import Response

PATH = "/deepgrpo/generate"


async def answer(scope, receive, send) -> None:
    """ASGI application of the route; a client that hangs up has its request aborted."""
    body = await _body(receive)
    work = asyncio.ensure_future(_generate(scope["app"].state.engine_client, body))
    gone = asyncio.ensure_future(_hang_up(receive))
    await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
    gone.cancel()
    if not work.done():
        work.cancel()
        return
    status, content = work.result()
    await Response(json.dumps(content, separators=(",", ":")), status, media_type="application/json")(scope, receive, send)


async def _generate(engine, body: bytes) -> tuple[int, dict]:
    """Status and content of the answer."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    try:
        asked = json.loads(body)
        plain = {"output_kind": RequestOutputKind.FINAL_ONLY, "flat_logprobs": True}
        wanted = asked["sampling_params"] | plain
        if "logit_bias" in wanted:
            wanted["logit_bias"] = {int(number): bias for number, bias in wanted["logit_bias"].items()}
        parameters = SamplingParams(**wanted)
        prompt = {"prompt_token_ids": asked["token_ids"], "cache_salt": asked["cache_salt"]}
        outputs = [output async for output in engine.generate(prompt, parameters, f"deepgrpo-{uuid.uuid4().hex}")]
    except (VLLMClientError, ValueError, KeyError, TypeError) as error:
        return 400, {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # the engine is dead, or dies of this: the client asks elsewhere, the supervisor's owner restarts
        return 500, {"error": f"{type(error).__name__}: {error}"}
    (final,) = outputs
    choices = [_choice(output) for output in final.outputs]
    if any(choice["finish_reason"] == "error" for choice in choices):
        return 500, {"error": "a sample ended with an error of the engine"}
    return 200, {"choices": choices, "cached_tokens": final.num_cached_tokens or 0}


def _choice(output) -> dict:
    ids, logprobs = list(output.token_ids), output.logprobs
    if logprobs is None or list(logprobs.token_ids) != ids:
        raise RuntimeError(f"sample {output.index} came without the log-prob of each of its {len(ids)} tokens")
    return {
        "index": output.index,
        "token_ids": ids,
        "logprobs": list(logprobs.logprobs),
        "finish_reason": output.finish_reason,
        "weight_versions": [dataclasses.astuple(span) for span in output.weight_versions or ()],
    }


async def _body(receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _hang_up(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
