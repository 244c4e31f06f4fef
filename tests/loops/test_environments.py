"""Search, code and functions as environments, and which one a row asks for."""

import contextlib
import http.server
import json
import pathlib
import threading

import pytest

from configs import common
from deepgrpo.config.errors import ConfigError
from deepgrpo.environments import functions
from deepgrpo.environments.base import Environment, Reply, environment_class, environment_of, open_environments, replay
from deepgrpo.environments.journal import ReplayMiss, journalled
from deepgrpo.rewards.answer import Answer
from deepgrpo.rewards.qa import grade_search
from deepgrpo.types import ENVIRONMENT, STUDENT, Problem, as_ids
from tests.loops.test_agent import Tool


def config(environment="", **changes):
    made = common.get_config()
    made.loop, made.agent.environment = "agent", environment
    made.agent.update(changes)
    return made


def problem(**extra) -> Problem:
    return Problem(0, "hotpotqa", as_ids([1]), "Paris", "Where?", extra)


def test_a_row_picks_its_environment():
    assert environment_of(problem(), "lookup") == "lookup"
    names = {"search_agent": "search", "deep_analyze_agent_loop": "code", "reasoning_agent_loop": "none", "lookup": "lookup"}
    assert {name: environment_of(problem(agent_name=name), "") for name in names} == names
    with contextlib.ExitStack() as stack:
        (only,) = open_environments(config(), [problem(agent_name="single_turn_agent")], None, stack).values()
        assert only.open(problem(), 0).step("Paris", False).observation is None
    assert environment_class("tests.loops.test_agent:Tool").__name__ == "Tool"


def test_a_chat_template_that_changes_what_it_wrote_is_refused_at_the_start():
    class Template:
        eos_token = "<|im_end|>"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            kept = [m["content"].split("</think>")[-1] for m in messages]  # as templates that drop earlier thoughts
            return "".join(f"<|im_start|>{text}<|im_end|>\n" for text in kept) + "<|im_start|>" * add_generation_prompt

        def encode(self, text, add_special_tokens):
            return [1]

    functions = {"functions": ("tests.loops.test_environments:add",)}
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match=r"not append-only \(with thoughts\)"):
        open_environments(config("functions", **functions), [problem()], Template(), stack)


def test_a_row_without_its_workspace_is_refused_at_loading(tmp_path):
    with contextlib.ExitStack() as stack, pytest.raises(ValueError, match="row 0 of hotpotqa.*workspace.*absent"):
        open_environments(config(), [problem(agent_name="code", workspace=str(tmp_path / "gone"))], None, stack)


@pytest.mark.parametrize("name", ["serch", "no.such.module:X", "deepgrpo.types:Problem", ""])
def test_an_unknown_environment_is_refused_by_name(name):
    with pytest.raises(ValueError, match="agent.environment"):
        environment_class(name)


def test_the_documented_environment_works(tmp_path, monkeypatch):
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text()
    (tmp_path / "shouting.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    made = environment_class("shouting:Shout")(config())
    assert made.open(problem(), 0).step("<shout>paris</shout>", True).observation == "<heard>PARIS</heard>"
    assert made.open(problem(), 0).step("Paris", False).observation is None


def test_answers_are_kept_for_a_resumed_run_and_a_replay(tmp_path):
    calls = []

    def reply(words):
        calls.append(words)
        return Reply(f"{len(calls)}\n", counts={"calls": 1})

    def talk(folder, replay="", seeds=(1, 2), words=("a?", "b?")):
        with contextlib.ExitStack() as stack:
            made = journalled({"tool": Tool(reply)}, replay, folder, stack)["tool"]
            episodes = [made.open(problem(), seed) for seed in seeds]
            found = [[episode.step(word, True).observation for word in words] for episode in episodes]
            for episode in episodes:
                episode.close()
            return found

    first = talk(tmp_path / "run")
    assert first == [["1\n", "2\n"], ["3\n", "4\n"]]
    with open(tmp_path / "run" / "answers.jsonl", "a") as file:
        file.write('{"key": "cut of')  # killed while it wrote
    assert talk(tmp_path / "run") == first and len(calls) == 4, "no tool is asked again"
    assert talk(tmp_path / "other", str(tmp_path / "run")) == first and len(calls) == 4
    with pytest.raises(ReplayMiss):
        talk(tmp_path / "other", str(tmp_path / "run"), words=("a?", "c?"))
    assert talk(tmp_path / "run", words=("a?", "c?")) == [["1\n", "6\n"], ["3\n", "8\n"]], "it is told what was before"
    with pytest.raises(ConfigError, match="agent.replay"):
        talk(tmp_path / "third", str(tmp_path / "nothing"))


#### Search


@pytest.fixture
def corpus(tmp_path):
    rows = [{"title": f"Town {i}", "text": f"The town number {i} lies on river {i % 7}."} for i in range(40)]
    rows += [{"title": "Paris", "text": "The capital of France."}, {"title": "Rome", "text": "The capital of Italy."}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_the_built_in_index_finds_what_the_query_says(corpus):
    search = environment_class("search")(config("search", corpus=str(corpus)))
    reply = search.open(problem(), 0).step("<think>x</think><search> capital of Italy </search>", True)
    assert reply.observation.startswith("\n\n<information>Doc 1(Title: Rome) The capital of Italy.\n")
    assert reply.observation.endswith("</information>\n\n") and "Doc 2(Title: Paris)" in reply.observation
    assert reply.counts["calls"] == 1 and replay(search, None, ()) == ""
    for words, handed_over in (("<search> </search>", True), ("<answer>Paris</answer>", False), ("</search>", True)):
        assert search.open(problem(), 0).step(words, handed_over).observation is None
    empty = search.open(problem(), 0).step("<search>xyzzy</search>", True)
    assert empty.observation == "\n\n<information></information>\n\n" and not empty.failed


@pytest.mark.parametrize(
    "lines, message", [("", "no passage found"), ('{"text": "a"}\n{"title": "b"}', "line 2"), ("[]", "line 1"), ("{", "line 1")]
)
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path, lines, message):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=message):
        environment_class("search")(config("search", corpus=str(tmp_path)))


@contextlib.contextmanager
def retriever(fail):
    """A service whose answers `fail(number)` replaces by an error."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            answer = {"result": [[{"document": {"contents": f"Title\n{body['queries'][0]}"}, "score": 1.0}]]}
            self.send_response(500 if fail(len(asked)) else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_retriever_is_asked_as_in_the_reference_and_its_failure_is_no_observation():
    broken = [False]
    with retriever(lambda number: broken[0] or number == 2) as (url, asked):
        search = environment_class("search")(config("search", retriever_url=url, tool_seconds=2.0))
        episode = search.open(problem(), 0)
        reply = episode.step("<search>who?</search>", True)  # the first attempt fails
        assert reply.observation == "\n\n<information>Doc 1(Title: Title) who?\n</information>\n\n"
        assert asked[-1] == {"queries": ["who?"], "topk": 3, "return_scores": True} and len(asked) == 3
        broken[0] = True
        assert episode.step("<search>who?</search>", True).failed.startswith("retriever") and len(asked) == 6
        assert episode.step("<search>who?</search>", True).failed and len(asked) == 6, "it is left alone for a moment"
        search.close()
    with pytest.raises(ConfigError, match="does not answer"):
        environment_class("search")(config("search", retriever_url=url, tool_seconds=1.0))
    with pytest.raises(ConfigError, match="either agent.retriever_url or agent.corpus"):
        environment_class("search")(config("search"))


def test_structure_counts_only_with_the_environments_information():
    parts = [
        (STUDENT, "<think>a</think><search>q</search>"),
        (ENVIRONMENT, "\n\n<information>Doc 1(Title: Paris) <answer>Rome</answer></information>\n\n"),
        (STUDENT, "<think>b</think><answer>Paris</answer>"),
    ]

    def graded(parts):
        own = "".join(text for who, text in parts if who == STUDENT)
        return grade_search(Answer("hotpotqa", "Where?", "", own, "stop", "Paris", parts=tuple(parts)))

    assert graded(parts).reward == 1.0
    forged = [(STUDENT, "".join(text for _, text in parts).replace("<answer>Rome</answer>", ""))]
    assert graded(forged).reward == 0.8  # right, but its structure is made up
    nothing = [(STUDENT, "<search>q</search>"), (ENVIRONMENT, "<information><answer>Paris</answer></information>")]
    assert graded(nothing).reward == 0.0


#### Code


def test_files_persist_and_rollouts_do_not_see_each_others(tmp_path):
    (tmp_path / "data.csv").write_text("1,2,3")
    code = environment_class("code")(config("code", tool_seconds=20.0))
    one, two = (code.open(problem(workspace=str(tmp_path)), seed) for seed in range(2))
    write = "<Code>\n```python\nopen('out.txt', 'w').write(open('data.csv').read() + 'x')\nprint(40 + 2)\n```\n</Code>"
    assert one.step(write, True).observation == "\n<Execute>\n42\n</Execute>\n"
    read = "<Code>print(open('out.txt').read())</Code>"
    assert one.step(read, True).observation == "\n<Execute>\n1,2,3x\n</Execute>\n"
    other = two.step(read, True)
    assert "[Error]:" in other.observation and other.counts == {"calls": 1, "errors": True} and not other.failed
    third = code.open(problem(workspace=str(tmp_path)), 2)
    trace = [(STUDENT, write), (ENVIRONMENT, "\n<Execute>\n42\n</Execute>\n"), (STUDENT, "<Analyze>")]
    assert replay(code, third, trace) == "" and third.step(read, True).observation == "\n<Execute>\n1,2,3x\n</Execute>\n"
    fourth = code.open(problem(workspace=str(tmp_path)), 3)
    assert replay(code, fourth, [(STUDENT, write), (ENVIRONMENT, "\n<Execute>\n41\n</Execute>\n")]) == "replay_mismatch"
    folders = [episode._folder for episode in (one, two, third, fourth)]
    for episode in (one, two, third, fourth):
        episode.close()
    assert not any(folder.exists() for folder in folders) and [p.name for p in tmp_path.iterdir()] == ["data.csv"]
    assert one.step("<Answer>42</Answer>", False).observation is None


#### Functions


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def test_functions_are_called_the_hermes_way():
    made = environment_class("functions")(config("functions", functions=("tests.loops.test_environments:add",)))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert made.open(problem(), 0).step(f"Let me see. {call}\n{call}", True).observation == "3\n3"
    assert made.open(problem(), 0).step("It is 3.", True).observation is None
    for words, said in (
        ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "there is no function sub; there are add"),
        ('<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "TypeError"),
        ('<tool_call>{"name": "add", "argum', "malformed"),
        ('<tool_call>{"name": 3}</tool_call>', "malformed"),
    ):
        reply = made.open(problem(), 0).step(words, True)
        assert said in reply.observation and not reply.failed, "the student's mistake is for the student to read"
    assert functions.called('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>') == [
        ("f", {"x": "</tool_call>"})
    ]
    (schema,) = functions.descriptions([add])
    assert schema["function"]["parameters"]["required"] == ["a"] and schema["function"]["description"] == "Adds."
    with pytest.raises(ConfigError, match="agent.functions"):
        environment_class("functions")(config("functions"))
    assert issubclass(environment_class("functions"), Environment)
