"""The pool that docs/method.md shows works as it stands there: one module and one entry."""

import re
import sys
import types

from deepgrpo.curriculum import POOLS
from tests.conftest import ROOT
from tests.test_train import in_process
from tests.test_train_pools import SMALL


def test_the_documented_pool_is_planned_trained_with_saved_and_resumed(student, tmp_path, monkeypatch):
    section = (ROOT / "docs" / "method.md").read_text().partition("## A pool of your own")[2].partition("\n## ")[0]
    source, entry = re.findall(r"```python\n(.*?)```", section, re.S)
    module = types.ModuleType("my_pools")
    monkeypatch.setitem(sys.modules, "my_pools", module)
    exec(compile(source, "docs/method.md", "exec"), module.__dict__)
    ((name, place),) = re.findall(r'POOLS\["(\w+)"\] = "(.+)"', entry)
    monkeypatch.setitem(POOLS, name, place)
    settings = SMALL | {"curriculum__pool": name, "teacher__enabled": False, "checkpoint__every": 2}
    records = in_process(tmp_path, **settings, train__steps=2)
    assert records[0]["retry_pool/size"] == 8 and records[1]["synthetic_inject/injected_count"] > 0
    (record,) = in_process(tmp_path, **settings, train__steps=3)[2:]  # resumed from step 2
    assert record["synthetic_inject/injected_count"] > 0
