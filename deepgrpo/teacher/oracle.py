"""A rule-based teacher behind the same HTTP interface as a served model: `with Oracle("carry_chain") as oracle: oracle.base_url`.

It reads question and student's text out of the prompt (`deepgrpo.teacher.prompts`) and asks a rule, which keeps what is right of
the student's text, verbatim, and goes on with the right steps. A share of the corrections can be made wrong.

    python -m deepgrpo.teacher.oracle --rule carry_chain --port 8001
"""

import argparse
import http.server
import json
import pathlib
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np

from deepgrpo.data import carry_chain, lookup_chain, tables
from deepgrpo.data.cells import TEXT
from deepgrpo.teacher import prompts

MODEL = "oracle"


# (question with what else the student is told, student's text, locked prefix) -> its continuation; None: no idea
Correct = Callable[[str, str, str], str | None]


class Oracle:
    """Serves a rule on the loopback interface, in a thread of its own. `base_url` is known once it is made; use it in a `with`.

    requests: chat completions received so far. error_rate: share of corrections with a wrong digit; `seed` and the prompt decide
    which ones.
    """

    def __init__(
        self,
        rule: str | Correct,
        *,
        port: int = 0,
        error_rate: float = 0.0,
        seed: int = 0,
    ):
        self.correct = find_rule(rule) if isinstance(rule, str) else rule
        self.error_rate, self.seed = error_rate, seed
        self.requests = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._server.oracle = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="oracle", daemon=True)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> "Oracle":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving; half-open requests end. Idempotent."""
        self.closing.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(10.0)
        self._server.server_close()

    def next_request(self) -> int:
        with self._lock:
            self.requests += 1
            return self.requests - 1


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 makes the sixth of simultaneous connections wait a second, or resets it


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 600.0  # seconds an idle connection is kept

    def do_GET(self) -> None:
        if self.path.rstrip("/") == "/v1/models":
            self.send_json(200, {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "deepgrpo"}]})
        else:
            self.send_json(404, {"error": {"message": f"no route {self.path}", "type": "not_found"}})

    def do_POST(self) -> None:
        if self.server.oracle.closing.is_set():  # a connection kept alive outlives the listening socket
            self.close_connection = True
            return None
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.rstrip("/") != "/v1/chat/completions":
            return self.send_json(404, {"error": {"message": f"no route {self.path}", "type": "not_found"}})
        try:
            request = json.loads(body)
            prompt = request["messages"][-1]["content"]
            reply = self.reply(prompt)
        except (ValueError, LookupError, TypeError) as error:
            return self.send_json(400, {"error": {"message": f"bad request: {error}", "type": "invalid_request_error"}})
        self.answer(self.server.oracle.next_request(), prompt, reply)

    def reply(self, prompt: str) -> str:
        try:
            slots = prompts.read_slots(prompt)
        except prompts.ParseError as error:
            return f"{prompts.ERROR_HEADER}\n{error}"  # like a model, it answers whatever it is asked
        solution = self.server.oracle.correct(slots.problem, slots.student, slots.verified)
        if solution is None:
            return f"{prompts.ERROR_HEADER}\nThis is not a question that the rule knows."
        random = np.random.default_rng((self.server.oracle.seed, zlib.crc32(prompt.encode())))
        if random.random() < self.server.oracle.error_rate:
            solution = misled(solution, random)
        return f"{prompts.ERROR_HEADER}\nA step is wrong.\n\n{prompts.SOLUTION_HEADER}\n{solution}"

    def answer(self, ordinal: int, prompt: str, text: str) -> None:
        """ordinal: of the request, from 0."""
        self.send_json(200, completion(prompt, text))

    def send_json(self, status: int, payload: dict, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        body = json.dumps(payload).encode()[:cut]
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a demo's terminal belongs to the demo."""


def misled(solution: str, random: np.random.Generator) -> str:
    """The solution with one digit, anywhere in it, changed to another; the same text if it has none."""
    places = [i for i, character in enumerate(solution) if character in "0123456789"]
    if not places:
        return solution
    i = places[random.integers(len(places))]
    return solution[:i] + str((int(solution[i]) + random.integers(1, 10)) % 10) + solution[i + 1 :]


def completion(prompt: str, text: str) -> dict:
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(text.split())}  # words: the rule has no tokenizer
    return {
        "id": "chatcmpl-oracle",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {**usage, "total_tokens": sum(usage.values())},
    }


#### Rules


def correct_carry_chain(question: str, student: str, locked: str) -> str | None:
    """The one right solution, from where the locked prefix stops."""
    del student  # solutions are unique: what is right of the student's text is a prefix of this
    found = carry_chain.QUESTION.search(question)
    return found and _after(locked, carry_chain.solution(found[0]))


def correct_lookup_chain(question: str, student: str, locked: str) -> str | None:
    """The solution that asks for each value, with what the environment answers, from where the locked prefix stops."""
    del student  # what is right of it is a prefix of this, up to where it began to invent
    found = lookup_chain.QUESTION.search(question)
    return found and _after(locked, lookup_chain.solution(found[0]))


_SUM = re.compile(r"(\d+(?:\s*\+\s*\d+)+)\s*=\s*\?")


def correct_arithmetic(question: str, student: str, locked: str) -> str | None:
    """Sums line by line: "47 + 38 + 25 = ?" -> "47 + 38 = 85\\n85 + 25 = 110\\n#### 110", in the student's spacing."""
    asked = _SUM.findall(question)  # the last one: examples come before it
    if not asked:
        return None
    terms = [int(term) for term in asked[-1].split("+")]
    written, total, lines, right = (locked + student).splitlines(), terms[0], [], True
    for i, term in enumerate(terms[1:]):
        line, total = f"{total} + {term} = {total + term}", total + term
        if right and i < len(written):
            line, right = _keep_spacing(written[i], line)
        lines.append(line)
    return _after(locked, "\n".join([*lines, f"#### {total}"]))


def _keep_spacing(written: str, right: str) -> tuple[str, bool]:
    """Returns `right`, spaced like `written` as far as they agree otherwise, and whether they agree to the end."""
    position = done = 0
    for token in re.finditer(r"\d+|\S", right):
        found = re.compile(r" *(\d+|\S)").match(written, position)
        if found is None:
            return written[:position] + right[done:], False
        if found[1] != token[0]:
            return (written[: found.start(1)] + right[token.start() :] if position else right), False
        position, done = found.end(), token.end()
    return (written, True) if not written[position:].strip() else (right, False)


def solutions_rule(path: str) -> Correct:
    """Reference solutions from a JSONL file of `question` and `answer` (such as GSM8K's train file).

    Of the student's text it keeps the leading lines whose equations hold and whose results the reference has too, then goes on
    with the reference solution.

    Raises:
      FileNotFoundError, DataError: no such file, or no such rows in it; names it.
    """
    rows = tables.read(path, {"question": TEXT, "answer": TEXT})
    answers = {row["question"].strip(): re.sub(r"<<[^>]*>>", "", row["answer"]) for row in rows}

    def correct(question: str, student: str, locked: str) -> str | None:
        del locked  # its steps need not be repeated: the reference's may follow them
        answer = answers.get(question.strip())
        if answer is None:  # the question stands among instructions
            answer = answers.get(max((known for known in answers if known in question), key=len, default=""))
        return None if answer is None else _sound_lines(student, answer) + answer

    return correct


_EQUATION = re.compile(r"([\d.,]+(?:\s*[-+*/x×]\s*\$?[\d.,]+)+)\s*=\s*\$?([\d.,]*\d)")


def _sound_lines(student: str, reference: str) -> str:
    """The leading lines of `student` up to the last sound one: it has equations, all hold, all results occur in `reference`."""
    known = {_number(text) for text in re.findall(r"[\d.,]*\d", reference)}
    sound = seen = 0
    for line in student.splitlines(keepends=True):
        equations = _EQUATION.findall(line)
        if "####" in line or "boxed" in line or not all(_holds(*equation, known) for equation in equations):
            break
        seen += len(line)
        sound = seen if equations else sound
    kept = student[:sound]
    return kept if not kept or kept.endswith("\n") else kept + "\n"


def _holds(left: str, result: str, known: set[float | None]) -> bool:
    """Whether a chain of + - * / (left to right within precedence) gives `result`, and `result` is a known number."""
    total, sign, product = 0.0, 1.0, None
    for operator, text in re.findall(r"([-+*/x×]?)\s*\$?([\d.,]+)", left):
        number = _number(text)
        if number is None or (operator == "/" and number == 0):
            return False
        if operator in ("*", "x", "×"):
            product *= number
        elif operator == "/":
            product /= number
        else:
            total += sign * (product or 0.0)
            sign, product = (-1.0 if operator == "-" else 1.0), number
    value = _number(result)
    return value is not None and value in known and abs(total + sign * (product or 0.0) - value) < 1e-6


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return None


def _after(locked: str, solution: str) -> str | None:
    """What follows `locked` in the whole solution; None when the solution does not start like that."""
    return solution[len(locked) :] if solution.startswith(locked) else None


RULES: dict[str, Callable[[str], Correct]] = {  # each takes what follows its colon
    "carry_chain": lambda path: correct_carry_chain,
    "lookup_chain": lambda path: correct_lookup_chain,
    "arithmetic": lambda path: correct_arithmetic,
    "solutions": solutions_rule,
}


def find_rule(name: str) -> Correct:
    """name: carry_chain | lookup_chain | arithmetic | solutions:FILE. Raises ValueError for another, or without the file."""
    rule, _, file = name.partition(":")
    if rule not in RULES or (rule == "solutions") != bool(file) or (file and not pathlib.Path(file).is_file()):
        raise ValueError(
            f"no rule {name!r}; expected carry_chain, lookup_chain, arithmetic or solutions:FILE, a JSONL of question and answer"
        )
    return RULES[rule](file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepgrpo.teacher.oracle",
        description="Serves a rule-based teacher on the loopback interface, OpenAI-compatible.",
    )
    parser.add_argument(
        "--rule", required=True, help="carry_chain | lookup_chain | arithmetic | solutions:FILE, a JSONL of question and answer"
    )
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--error-rate", type=float, default=0.0, help="share of corrections with a wrong digit")
    options = parser.parse_args(arguments)
    try:
        served = Oracle(options.rule, port=options.port, error_rate=options.error_rate)
    except ValueError as error:
        parser.error(str(error))
    with served as oracle:
        print(f"serving {options.rule} at {oracle.base_url} (model {MODEL}); Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(3600.0)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
