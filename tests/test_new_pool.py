"""The pool that docs/method.md shows works as it stands there: one module and one entry."""

from deepgrpo.curriculum import POOLS
from tests.conftest import enter_documented
from tests.test_train import in_process
from tests.test_train_pools import SMALL


def test_the_documented_pool_is_planned_trained_with_saved_and_resumed(student, tmp_path, monkeypatch):
    name = enter_documented("A pool of your own", "my_pools", POOLS, monkeypatch)
    settings = SMALL | {"curriculum__pool": name, "teacher__enabled": False, "checkpoint__every": 2}
    records = in_process(tmp_path, **settings, train__steps=2)
    assert records[0]["retry_pool/size"] == 8 and records[1]["synthetic_inject/injected_count"] > 0
    (record,) = in_process(tmp_path, **settings, train__steps=3)[2:]  # resumed from step 2
    assert record["synthetic_inject/injected_count"] > 0
