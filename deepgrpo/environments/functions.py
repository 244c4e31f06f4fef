"""Plain Python functions as tools, called the Hermes way in a chat: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

agent.functions=("my_module:add",) names them. What the student should know of them stands in its prompt; `descriptions` gives the
JSON schemas that chat templates take. A function runs in a thread of the trainer: it must be quick, thread-safe and trusted.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections

from deepgrpo.config.errors import ConfigError
from deepgrpo.environments.base import Dialect, Environment, Episode, Reply
from deepgrpo.rewards.reward import resolve
from deepgrpo.types import Problem

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_JSON = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array", dict: "object"}


class Functions(Environment):
    """A turn without a call is the answer. `pure` in the sense of replay only if each function is: they are called again."""

    dialect = Dialect(chat=True)
    replay = "rerun"

    def __init__(self, config: ml_collections.ConfigDict):
        """Raises ConfigError: no function is named, or one cannot be imported."""
        if not config.agent.functions:
            raise ConfigError('agent.environment=functions needs agent.functions, for instance ("my_module:add",)')
        try:
            found = [resolve(path) for path in config.agent.functions]
        except ValueError as error:
            raise ConfigError(f"agent.functions: {error}") from error
        self.functions: dict[str, Callable] = {function.__name__: function for function in found}

    def open(self, problem: Problem, seed: int) -> Episode:
        return _Functions(self.functions)


class _Functions(Episode):
    def __init__(self, functions: dict[str, Callable]):
        self._functions = functions

    def step(self, words: str, handed_over: bool) -> Reply:
        calls = called(words) if handed_over else []
        if not calls:
            return Reply(None)
        answers, malformed = [], 0
        for call in calls:
            if isinstance(call, str):
                malformed += 1
                answers.append(f"Error: the call is malformed: {call}")
                continue
            name, arguments = call
            if name not in self._functions:
                answers.append(f"Error: there is no function {name}; there are {', '.join(self._functions)}")
                continue
            try:
                answers.append(str(self._functions[name](**arguments)))
            except Exception as error:  # the student's arguments are at fault, or the function is: it reads which
                answers.append(f"Error: {type(error).__name__}: {error}")
        return Reply("\n".join(answers), counts={"calls": len(calls), "malformed_calls": malformed})


def called(words: str) -> list[tuple[str, dict[str, Any]] | str]:
    """(name, arguments) of each call in a turn, or why it is none. Calls are read by a JSON decoder, so that a closing tag inside
    of an argument is text."""
    found, decoder, place = [], json.JSONDecoder(), 0
    while (place := words.find(OPEN, place)) >= 0:
        place += len(OPEN)
        text = words[place:].lstrip()
        try:
            call, used = decoder.raw_decode(text)
        except ValueError as error:
            found.append(str(error))
            continue
        place = len(words) - len(text) + used
        if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments", {}), dict):
            found.append((call["name"], call.get("arguments", {})))
        else:
            found.append('expected {"name": ..., "arguments": {...}}')
    return found


def descriptions(functions: Sequence[Callable]) -> list[dict[str, Any]]:
    """JSON schemas of functions, from their signatures and docstrings."""
    made = []
    for function in functions:
        parameters = inspect.signature(function).parameters
        properties = {name: {"type": _JSON.get(parameter.annotation, "string")} for name, parameter in parameters.items()}
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        schema = {"type": "object", "properties": properties, "required": required}
        about = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": schema}
        made.append({"type": "function", "function": about})
    return made
