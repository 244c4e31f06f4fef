"""Replies on disk: content decides the key, a torn line is dropped, a replay never opens a socket, totals survive a resume."""

import asyncio
import resource
import signal

import pytest

from deepgrpo.endpoint.cache import FILE, ReplayMiss, ReplyCache, request_key
from tests.endpoint.scripted import Scripted, completion, ok, run

REQUEST = {"model": "m", "messages": [{"role": "user", "content": "q"}], "temperature": 0.3}


def ask_all(client, prompts):
    return run(*(lambda p=p: client.ask(p, ok) for p in prompts))


def logical(client):
    """Metrics that may not depend on where a reply came from."""
    return {k: v for k, v in client.metrics().items() if "/http_" not in k}


def test_key_is_the_content():
    assert request_key(REQUEST, 0) == request_key(dict(reversed(REQUEST.items())), 0)
    assert len({request_key(REQUEST, 0), request_key(REQUEST, 1), request_key(REQUEST | {"temperature": 0.7}, 0)}) == 3


def test_torn_last_line_is_dropped_and_another_broken_one_named(tmp_path):
    cache = ReplyCache(tmp_path)
    cache.add(REQUEST, 0, {"text": "eins \ud83d\u2028"})
    cache.add(REQUEST, 1, {"text": "zwei"})
    cache.close()
    file = tmp_path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    cache = ReplyCache(tmp_path)
    assert cache.find(REQUEST, 0) == {"text": "eins \ud83d\u2028"} and cache.find(REQUEST, 1) is None
    cache.add(REQUEST, 1, {"text": "drei"})
    cache.close()
    assert ReplyCache(tmp_path).find(REQUEST, 1) == {"text": "drei"}
    file.write_bytes(b"junk\n" + whole)
    with pytest.raises(ValueError, match=f"{FILE}:1"):
        ReplyCache(tmp_path)


def test_replay_sends_nothing_and_gives_the_same_replies(tmp_path):
    prompts = ["a", "b", "a", "c", "a"]  # equal requests share one reply, whichever comes first
    live = Scripted([completion("bad"), *(completion(f"ok{i}") for i in range(9))])
    first = live.client(cache=ReplyCache(tmp_path / "first"))
    replies = ask_all(first, prompts)
    assert replies[0] == replies[2] == replies[4] and len(live.requests) == 4 and logical(first)["teacher/cache_hits"] >= 2

    dead = Scripted([AssertionError("a replay must not send")])
    second = dead.client(cache=ReplyCache(tmp_path / "second", replay=tmp_path / "first"))
    assert ask_all(second, prompts[::-1]) == replies[::-1]
    assert logical(second) == logical(first) and not dead.requests
    [miss] = ask_all(second, ["never asked"])
    assert isinstance(miss, ReplayMiss) and "never asked" in str(miss) and not dead.requests

    third = dead.client(cache=ReplyCache(tmp_path / "third", replay=tmp_path / "second"))
    assert ask_all(third, prompts) == replies, "a replayed run's folder is complete in itself"
    with pytest.raises(FileNotFoundError, match="absent"):
        ReplyCache(tmp_path / "fourth", replay=tmp_path / "nowhere")


def test_totals_of_a_resumed_run_equal_the_uninterrupted_ones(tmp_path):
    live = Scripted([completion("ok")])
    client = live.client(cache=ReplyCache(tmp_path))
    ask_all(client, ["a", "b"])
    checkpoint = client.state()
    ask_all(client, ["c", "a", "d"])  # lost by a crash; their replies are on disk
    uninterrupted = logical(client)

    live.replies = [AssertionError("already paid for")]
    resumed = live.client(cache=ReplyCache(tmp_path))
    resumed.restore(checkpoint)
    ask_all(resumed, ["c", "a", "d"])
    assert {k: v for k, v in logical(resumed).items() if "latency" not in k} == {
        k: v for k, v in uninterrupted.items() if "latency" not in k
    }
    with pytest.raises(ValueError, match="start a new run"):
        live.client(cache=ReplyCache(tmp_path / "other")).restore(checkpoint)


def test_a_failed_leader_lets_its_followers_ask(tmp_path):
    from deepgrpo.endpoint.errors import Refused

    live = Scripted([Refused("refused", "no"), completion("ok")])
    client = live.client(cache=ReplyCache(tmp_path))

    async def main():
        return await asyncio.gather(*(client.ask("q", ok) for _ in range(3)), return_exceptions=True)

    results = asyncio.run(main())
    assert results[0].kind == "refused" and [r.parsed for r in results[1:]] == ["OK", "OK"] and len(live.requests) == 2


def test_instructions_are_stored_once_and_every_request_can_be_read_back(tmp_path):
    def request(question):
        return REQUEST | {"messages": [{"role": "user", "content": "Instructions. " * 100 + question}]}

    questions = ["a", "b", "c \u00e9", ""]
    for attempt in range(2):  # and again on the reopened file
        cache = ReplyCache(tmp_path)
        for question in questions:
            cache.add(request(question), attempt, {"text": question})
        cache.close()
    cache = ReplyCache(tmp_path)
    for question in questions:
        for attempt in range(2):
            assert cache.find(request(question), attempt) == {"text": question}
            assert cache._log.read(request_key(request(question), attempt))["request"] == request(question)
    assert (tmp_path / FILE).read_text().count("Instructions.") == 100
    copy = ReplyCache(tmp_path / "copy", replay=tmp_path)
    for question in reversed(questions):
        assert copy.find(request(question), 1) == {"text": question}
    assert copy._log.read(request_key(request("a"), 1))["request"] == request("a")


def test_a_full_disk_loses_one_reply_and_no_other(tmp_path):
    """The record that had no room leaves nothing behind, not even half a line."""
    request = {"messages": [{"role": "user", "content": "p" * 400}]}
    full, limits = {"text": "x" * 4000}, resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    cache = ReplyCache(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        with pytest.raises(OSError):
            cache.add(request | {"seed": 1}, 0, full)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    for seed in (2, 3):
        cache.add(request | {"seed": seed}, 0, {"text": str(seed)})
    for opened in (cache, ReplyCache(tmp_path)):
        assert opened.entries == 2 and opened.find(request | {"seed": 1}, 0) is None
        assert [opened.find(request | {"seed": seed}, 0) for seed in (2, 3)] == [{"text": "2"}, {"text": "3"}]
        opened.close()
