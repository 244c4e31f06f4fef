"""The check at the start asks teacher and judge for one token, as the run will ask them, and says what helps."""

import socket

import pytest

from configs import common
from deepgrpo.preflight import inputs as preflight
from tests.faults import behaviours
from tests.faults.behaviours import KWARGS, SECRET, body, refuses
from tests.faults.conftest import begin
from tests.faults.scripted_endpoint import MODEL, Endpoint, right


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setattr(preflight, "ENDPOINT_SECONDS", 60.0)
    config = common.get_config()
    config.teacher.model = MODEL
    return config


def found(config, base_url):
    config.teacher.base_url = base_url
    return preflight.endpoint_problems(config)


def picky(exchange):
    """A model that thinks, and takes neither the old name of the limit nor a limit of one token."""
    if "max_tokens" in exchange.asked:
        return refuses("Use 'max_completion_tokens' instead of 'max_tokens'.")(exchange)
    if "max_completion_tokens" in exchange.asked:
        return refuses("Could not finish the message because max_tokens was reached.")(exchange)
    right(exchange)


LIMIT = preflight.ENDPOINT_SECONDS
HTML = body("<!doctype html><title>Portal login</title>")


@pytest.mark.parametrize(
    "models",
    [
        lambda e: e.say([{"id": MODEL}]),
        lambda e: e.say({"data": [{"id": "an alias"}]}),
        body(behaviours.DEEP),
        body('{"data": [{"name": 3}, null]}'),
        *(refuses("no route", 404), HTML, behaviours.silent, behaviours.hangs_up, behaviours.endless, behaviours.inflates),
    ],
)
@pytest.mark.parametrize("chat", [right, picky])
def test_whoever_answers_chats_may_list_its_models_as_it_likes(config, models, chat):
    with Endpoint(chat, models) as endpoint:
        assert found(config, endpoint.base_url) == []
        assert {asked["temperature"] for asked in endpoint.asked} == {0.3, 0.7}
        assert all(asked["chat_template_kwargs"] == {"enable_thinking": False} for asked in endpoint.asked)


@pytest.mark.parametrize(
    "chat, says, helps",
    [
        (refuses(KWARGS), KWARGS, "--config.teacher.enable_thinking=unset"),
        (refuses("'temperature' does not support 0.3"), "does not support 0.3", "--config.teacher.temperatures"),
        (lambda e: refuses("temperature")(e) if e.asked["temperature"] > 0.5 else right(e), "temperature", "temperatures"),
        (refuses(f"Incorrect API key provided: {SECRET}", 401), "Incorrect API key provided: [redacted]", "OPENAI_API_KEY"),
        (refuses("The model does not exist", 404), "does not exist", "--config.teacher.model"),
        (body("", 302, Location="https://elsewhere/v1"), "https://elsewhere/v1", "--config.teacher.base_url"),
        (HTML, "Portal login", "/v1"),
        (body(behaviours.DEEP), "RecursionError", "--config.teacher.base_url"),
        (body('{"error": {"message": "Provider returned error", "code": 502}}'), "Provider returned error", "log"),
        (behaviours.silent, " 1 s", "--config.teacher.timeout"),
        (behaviours.drips, " 1 s", "--config.teacher.base_url"),
        (behaviours.no_http, "127.0.0.1", "vllm serve"),
        (behaviours.endless, "16 MiB", "--config.teacher.base_url"),
        (refuses("Engine is dead", 500), "Engine is dead", "log"),
    ],
)
def test_the_endpoints_own_words_and_the_key_that_helps(config, monkeypatch, chat, says, helps):
    if chat in (behaviours.silent, behaviours.drips):
        monkeypatch.setattr(preflight, "ENDPOINT_SECONDS", 1.5)
    with Endpoint(chat, refuses("no route", 404)) as endpoint:
        [(what, remedy, fatal)] = found(config, endpoint.base_url)
    assert what.startswith("teacher: ") and says in what and helps in remedy and fatal
    assert "--config.teacher.enabled=false" in remedy and SECRET not in what + remedy


def test_an_endpoint_that_is_busy_or_unwilling_gives_a_warning(config, monkeypatch):
    monkeypatch.setattr(preflight, "ENDPOINT_SECONDS", 2.5)
    for chat in (behaviours.silent, refuses("slow down", 429, Retry_After="60"), behaviours.COMMON["refusal"][0]):
        with Endpoint(chat) as endpoint:
            [finding] = found(config, endpoint.base_url)
        assert not finding.fatal


def test_another_model_and_a_missing_key(config, monkeypatch):
    with Endpoint(refuses("The model does not exist", 404)) as endpoint:
        config.teacher.model = "another"
        [(what, remedy, _)] = found(config, endpoint.base_url)
        assert f"serves {MODEL}, not another" in what and "--config.teacher.model" in remedy
        monkeypatch.delenv("OPENAI_API_KEY")
        endpoint.behave = refuses("no key", 401)
        [(what, remedy, _)] = found(config, endpoint.base_url)
        assert "OPENAI_API_KEY is not set" in what and "export OPENAI_API_KEY" in remedy


def test_certificates(config, monkeypatch, tmp_path):
    with Endpoint(tls=tmp_path) as endpoint:
        [(what, remedy, _)] = found(config, endpoint.base_url)
        assert "certificate" in what and "SSL_CERT_FILE" in remedy
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert found(config, endpoint.base_url) == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
        assert found(config, endpoint.base_url)[0].fatal


@pytest.mark.parametrize(
    "address", ["http://nowhere.invalid/v1", "http://127.0.0.1:99999/v1", "http://[::1/v1", "http://1:2:3/v1"]
)
def test_addresses_that_lead_nowhere(config, address):
    assert [finding.fatal for finding in found(config, address)] == [True]


@pytest.mark.parametrize("key", ["two\nlines-of-a-key", "a-k\u00e9y-in-letters", " "])
def test_keys_that_no_header_may_hold(config, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with Endpoint() as endpoint:
        findings = found(config, endpoint.base_url)
    assert all("OPENAI_API_KEY" in remedy for _, remedy, _ in findings) and len(findings) == bool(key.strip())
    assert not any("lines-of-a-key" in what for what, _, _ in findings)


def test_the_key_goes_to_no_other_host(config):
    with Endpoint() as other:
        aside = body("", 307, Location=f"{other.base_url}/chat/completions")
        with Endpoint(aside, aside) as endpoint:
            assert found(config, endpoint.base_url)[0].fatal
        assert other.asked == []


def test_silent_endpoints_of_both_are_named_within_one_limit(config, monkeypatch):
    assert LIMIT < 5.0
    monkeypatch.setattr(preflight, "ENDPOINT_SECONDS", 1.0)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config.judge.base_url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config.judge.model = "m"
        findings = found(config, config.judge.base_url)
    assert [finding.what.partition(":")[0] for finding in findings] == ["teacher", "judge"]
    config.judge.base_url, config.teacher.enabled = "", False
    assert preflight.endpoint_problems(config) == []


def test_a_run_is_refused_before_it_starts(student, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    with Endpoint(refuses(f"{KWARGS} {SECRET}")) as endpoint:
        with pytest.raises(SystemExit, match="(?s)Unrecognized request argument.*--config.teacher.enable_thinking=unset"):
            begin(tmp_path, teacher__base_url=endpoint.base_url, teacher__model=MODEL)
    assert not any(SECRET in path.read_text() for path in tmp_path.rglob("*.*"))
