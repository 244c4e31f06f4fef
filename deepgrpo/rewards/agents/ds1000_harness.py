"""Tests code against a harness, each in a process of its own. Run by `ds1000` inside the sandbox, as a script.

The harness process holds the tests, the expected values and the channel of the verdict. It never runs tested code: the `exec` and
`eval` that its tests call run the code in a second process, the workshop, and bring back plain values (numbers, text, containers,
arrays, tables), rebuilt from an allow-list of types. Anything else, such as an object of a class that the code defines, stays in
the workshop and is represented by a `Remote`, which can be called and read but equals nothing. So an always-equal object, an
early exit, a patched module or a forged verdict have nothing to act on.

The figures that tested code leaves in matplotlib are brought over in the same way after each run, since tests look at them
("draws"). A figure that cannot be brought over leaves no verdict.
"""

import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import json
import marshal
import os
import pickle
import re
import socket
import subprocess
import sys
import traceback
import types
from multiprocessing.connection import Connection

LARGEST = 512 * 2**20  # bytes of one message
PR_SET_DUMPABLE = 4


class Raised(Exception):
    """Tested code raised something that the harness process has no builtin class for."""


class Broken(Exception):
    """The tests are not such."""


class WorkshopEnded(Exception):
    """The process that ran the tested code is gone."""


#### Values from the workshop

BUILTINS = frozenset(
    "complex set frozenset bytearray range slice list dict tuple int float bool str bytes object".split()
    + [name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)]
)
PLAIN = {
    "builtins": BUILTINS,
    "copyreg": {"_reconstructor"},
    "collections": {"OrderedDict", "Counter", "deque", "defaultdict"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "numpy": {"ndarray", "dtype", "matrix"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy.ma.core": {"_mareconstruct", "MaskedArray"},
    "numpy.matrixlib.defmatrix": {"matrix"},
}
LIBRARIES = frozenset(("numpy", "pandas", "scipy", "sklearn", "torch", "tensorflow", "xgboost", "lightgbm", "statsmodels"))
DRAWING = ("matplotlib", "mpl_toolkits")
NOT_DRAWN = ("animation", "backends", "dviread", "testing", "texmanager", "sphinxext", "widgets")
FIGURES = {
    "functools": {"partial"},
    "itertools": {"count"},
    "matplotlib.backend_bases": {"_key_handler", "_mouse_handler"},
    "matplotlib.cbook": {"_exception_printer"},
    "matplotlib.colorbar": {"_remove_cbar_axes"},
    "numpy": {"log", "log2", "log10", "exp", "exp2", "power"},
    "numpy.ma": {"MaskedArray"},
}
REBUILDERS = re.compile(r"(?:^|_)(?:new|unpickle|rebuild|reconstruct)(?:_|$)")  # functions by which libraries restore values


class Unpickler(pickle._Unpickler):  # the one in Python: its steps can be guarded
    """Loads values of known types only; UnpicklingError for any other, whose code would run here.

    Nothing but what `find_class` gave is called, and nothing is set on a class, whose methods the tests use.
    """

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
            raise pickle.UnpicklingError("an attribute of a class or a function would change")
        super().load_build()

    def load_reduce(self) -> None:
        function = self.stack[-2]
        if isinstance(function, types.MethodType | functools.partial) or not callable(function):
            raise pickle.UnpicklingError("only types and functions that restore values are called")
        super().load_reduce()

    dispatch[pickle.BUILD[0]], dispatch[pickle.REDUCE[0]] = load_build, load_reduce

    def find_class(self, module: str, name: str):
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        root = module.partition(".")[0]
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _torch_storage  # torch's own would unpickle anything
        if root in LIBRARIES and root != "numpy" and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__.partition(".")[0] == root:
                return found
            if callable(found) and REBUILDERS.search(name):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value's type")


class FigureUnpickler(Unpickler):
    """Loads figures of matplotlib, too: objects of its classes, but for those that start programs or read files."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return _method
        if name in FIGURES.get(module, ()):
            return pickle._Unpickler.find_class(self, module, name)
        if module.partition(".")[0] in DRAWING and module.split(".")[1] not in NOT_DRAWN:
            found = pickle._Unpickler.find_class(self, module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return super().find_class(module, name)


def _method(owner, name: str):
    """A method of a drawn object, or of the list that holds it, which others hold as a callback."""
    if type(owner) is list and name == "remove":
        return owner.remove
    found = getattr(owner, name) if type(owner).__module__.partition(".")[0] in DRAWING and not name.startswith("__") else None
    if not isinstance(found, types.MethodType) or found.__self__ is not owner:
        raise pickle.UnpicklingError(f"{name} is no method of a drawn object")
    return found


def _torch_storage(data: bytes):
    return importlib.import_module("torch").load(io.BytesIO(data), weights_only=True)


def load(data: bytes):
    return Unpickler(io.BytesIO(data)).load()


def open_figures() -> list[int]:
    return sys.modules["matplotlib.pyplot"].get_fignums() if "matplotlib.pyplot" in sys.modules else []


class Remote:
    """Something that lives in the workshop. Equal to itself alone."""

    def __init__(self, workshop: "Workshop", handle: int, kind: str):
        self.__dict__.update(_workshop=workshop, _handle=handle, _kind=kind)

    def __call__(self, *args, **kwargs):
        return self._ask("call", *args, **kwargs)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __getitem__(self, key):
        return self._ask("getitem", key)

    def __iter__(self):
        return iter(self._workshop.items(self._handle))

    def __len__(self):
        return self._ask("len")

    def __repr__(self) -> str:
        return f"<{self._kind} of the tested code>"

    def _ask(self, what: str, *args, **kwargs):
        return self._workshop.ask(what, self._handle, args, kwargs)


class Workshop:
    """The harness's end: runs code in the other process, on dicts that are kept the same on both sides."""

    def __init__(self, draws: bool = False):
        self._draws = draws
        ours, theirs = (Connection(end.detach()) for end in socket.socketpair())
        self._connection = ours
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", os.path.abspath(__file__), "workshop", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._spaces: list[dict] = []  # those sent so far; a dict's number is its place here

    def exec(self, code, globals=None, locals=None, /, *, closure=None):
        self._run("exec", code, globals, locals)

    def eval(self, code, globals=None, locals=None, /):
        return self._run("eval", code, globals, locals)

    def ask(self, what: str, handle: int, args: tuple, kwargs: dict):
        sent = [self._encoded(value) for value in args], {name: self._encoded(value) for name, value in kwargs.items()}
        if any(value is None for value in (*sent[0], *sent[1].values())):
            raise TypeError("the tested code can only be given plain values")
        return self._decoded(self._exchange((what, handle, *sent))["value"])

    def items(self, handle: int) -> list:
        return [self._decoded(item) for item in self._exchange(("list", handle, (), {}))["items"]]

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _run(self, what: str, code, globals, locals):
        if globals is None:
            frame = sys._getframe(2)
            globals, locals = frame.f_globals, frame.f_locals if frame.f_locals is not frame.f_globals else None
        source = ("code", marshal.dumps(code)) if isinstance(code, types.CodeType) else ("text", code)
        spaces = [globals] if locals is None or locals is globals else [globals, locals]
        drawn = open_figures() if self._draws else None
        answer = self._exchange((what, source, [(self._number(space), self._names(space)) for space in spaces], drawn), spaces)
        if self._draws:
            self._draw(answer.get("figures", ()))
        return self._decoded(answer["value"])

    def _draw(self, figures) -> None:
        """Opens here the figures that are open over there."""
        for data in figures:
            try:
                FigureUnpickler(io.BytesIO(data)).load()  # a figure of pyplot enters itself under its number
            except Exception as error:
                raise Broken(f"a figure cannot be brought over: {type(error).__name__}: {error}") from error

    def _exchange(self, message, spaces=()) -> dict:
        try:
            self._connection.send_bytes(pickle.dumps(message))
            answer = load(self._connection.recv_bytes(LARGEST))
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkshopEnded(f"the tested code ended its process or sent junk ({type(error).__name__})") from error
        sys.stdout.write(answer.get("printed", ""))
        for space, (values, removed) in zip(spaces, answer.get("spaces", ()), strict=False):
            for name in removed:
                if not self._protected(space, name):
                    space.pop(name, None)
            for name, value in values.items():
                if not self._protected(space, name):
                    space[name] = self._decoded(value)
        if raised := answer.get("raised"):
            raise _exception(*raised)
        return answer

    def _protected(self, space: dict, name: str) -> bool:
        """Whether a name is the tests' own: a function of theirs, or a builtin that they would call."""
        own = getattr(space.get("exec"), "__self__", None) is self
        return own and (callable(space.get(name)) or name in vars(builtins) or name == "test_string")

    def _number(self, space: dict) -> int:
        for number, known in enumerate(self._spaces):
            if known is space:
                return number
        self._spaces.append(space)
        return len(self._spaces) - 1

    def _names(self, space: dict) -> dict:
        return {name: sent for name, value in space.items() if name != "__builtins__" and (sent := self._encoded(value))}

    def _encoded(self, value):
        if isinstance(value, Remote):
            return ("handle", value._handle)
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        try:
            return ("value", pickle.dumps(value))
        except Exception:  # functions and classes of the harness: they stay here
            return None

    def _decoded(self, value):
        if value is None:
            return None
        kind, data, handle, type_name = value
        if kind == "module" and data in sys.modules:
            return sys.modules[data]
        if kind == "value":
            with contextlib.suppress(Exception):
                return load(data)
        return Remote(self, handle, type_name)


def _exception(kind: str, message: str, module: str | None) -> Exception:
    """What the tested code raised, as far as it has a builtin class, since tests may expect one."""
    found = getattr(builtins, kind, None) if kind in BUILTINS else None
    if isinstance(found, type) and issubclass(found, ImportError):
        return found(message, name=module)
    if isinstance(found, type) and issubclass(found, Exception):
        with contextlib.suppress(TypeError):  # some need more than a message
            return found(message)
    return Raised(f"{kind}: {message}")


#### The workshop's own side


class Bench:
    """Runs what it is told and keeps what can't travel."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._kept: list = []
        self._spaces: dict[int, dict] = {}

    def serve(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except EOFError:
                return
            answer, printed = {"value": None}, io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    answer |= self._done(*message)
            except BaseException as error:
                answer["raised"] = (type(error).__name__, str(error)[:2000], getattr(error, "name", None))
            if message[0] in ("exec", "eval"):
                answer["spaces"] = [self._changes(number, names) for number, names in message[2]]
                answer["figures"] = self._figures() if message[3] is not None else []
            answer["printed"] = printed.getvalue()
            self._connection.send_bytes(pickle.dumps(answer))

    def _done(self, what: str, *args) -> dict:
        if what in ("exec", "eval"):
            (form, source), spaces, drawn = args
            if drawn is not None:
                self._close_all_but(drawn)
            source = marshal.loads(source) if form == "code" else source
            spaces = [self._space(number, names) for number, names in spaces]
            return {"value": self._encoded((exec if what == "exec" else eval)(source, *spaces))}
        handle, args, kwargs = args
        target, args = self._kept[handle], [self._decoded(value) for value in args]
        kwargs = {name: self._decoded(value) for name, value in kwargs.items()}
        actions = {"call": lambda: target(*args, **kwargs), "getattr": lambda: getattr(target, *args)}
        actions |= {"getitem": lambda: target[args[0]], "len": lambda: len(target)}
        if what == "list":
            return {"items": [self._encoded(item) for item in target]}
        return {"value": self._encoded(actions[what]())}

    def _close_all_but(self, drawn: list[int]) -> None:
        for number in set(open_figures()) - set(drawn):  # the tests closed it
            sys.modules["matplotlib.pyplot"].close(number)

    def _figures(self) -> list[bytes]:
        """The open figures; one that cannot be pickled is an empty text, which cannot be brought over."""
        figures = []
        for number in open_figures():
            try:
                figures.append(pickle.dumps(sys.modules["matplotlib.pyplot"].figure(number)))
            except Exception:
                figures.append(b"")
        return figures

    def _space(self, number: int, names: dict) -> dict:
        space = self._spaces.setdefault(number, {})
        for name in [name for name in space if name not in names and name != "__builtins__"]:
            del space[name]
        space |= {name: self._decoded(value) for name, value in names.items()}
        return space

    def _changes(self, number: int, sent: dict) -> tuple[dict, list]:
        space = self._spaces.get(number, {})
        values = {name: self._encoded(value) for name, value in space.items() if name != "__builtins__" and isinstance(name, str)}
        return values, [name for name in sent if name not in space]

    def _encoded(self, value):
        self._kept.append(value)
        handle, kind = len(self._kept) - 1, type(value).__name__
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__, handle, kind)
        try:
            return ("value", pickle.dumps(value), handle, kind)
        except Exception:
            return ("handle", None, handle, kind)

    def _decoded(self, value):
        kind, data = value
        if kind == "handle":
            return self._kept[data]
        return importlib.import_module(data) if kind == "module" else pickle.loads(data)


#### The harness


def run_tests(context: str, code: str, overrides: dict) -> None:
    """Defines the tests and calls them. Raises what they raise."""
    space = {"__name__": "ds1000_tests", **overrides}
    exec(compile(context, "<tests>", "exec"), space)
    if not callable(space.get("test_execution")):
        raise Broken("the tests define no test_execution")
    space["test_execution"](code)
    if "test_string" in space:
        space["test_string"](code)


def harness(job: dict) -> dict:
    """The verdict on one job: passed, failed, or broken (a fault of the tests or of this machine, not of the code)."""
    workshop = Workshop(job["draws"])
    try:
        compile(job["context"], "<tests>", "exec")
        run_tests(job["context"], job["code"], {"exec": workshop.exec, "eval": workshop.eval})
    except BaseException as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        detail = "".join(traceback.format_exception_only(error)).strip()[-500:]
        return {"verdict": "broken" if _lacks(missing, job["context"]) or _in_tests(error) else "failed", "detail": detail}
    finally:
        workshop.close()
    return {"verdict": "passed", "detail": ""}


def _lacks(module: str | None, context: str) -> bool:
    """Whether the tests themselves need a module that is not installed."""
    root = (module or "").partition(".")[0]
    if not root or not re.search(rf"^\s*(?:import|from)\s+{re.escape(root)}\b", context, re.MULTILINE):
        return False
    return importlib.util.find_spec(root) is None


def _in_tests(error: BaseException) -> bool:
    """Whether the tests could not even be defined."""
    if isinstance(error, Broken) or (isinstance(error, SyntaxError) and error.filename == "<tests>"):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    named = [frame.name for frame in frames if frame.filename == "<tests>"]
    return bool(named) and named[-1] == "<module>" and len(named) == 1


def main(arguments: list[str]) -> None:
    if arguments[0] == "workshop":
        return Bench(Connection(int(arguments[1]))).serve()
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the workshop is the same user's: it must not look in here
    with open(int(arguments[0])) as file:
        job = json.load(file)
    verdict = harness(job) | {"nonce": job["nonce"]}
    os.write(int(arguments[1]), json.dumps(verdict).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
