"""The curriculum without states: plain GRPO on the dataset's prompts."""

from collections.abc import Mapping, Sequence

import ml_collections

from deepgrpo.curriculum.base import Correction, Failure, State
from deepgrpo.curriculum.header import read_header, write_header
from deepgrpo.types import Group

_VERSION = 1


class NoCurriculum:
    """Keeps nothing and gives nothing."""

    def ready(self) -> int:
        return 0

    def sample(self, n: int, step: int) -> list[State]:
        return []

    def observe(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        return {}

    def dispatch(self, max_items: int, step: int) -> list[Failure]:
        return []

    def resolve(self, failure: Failure, correction: Correction | None, step: int) -> str:
        raise ValueError(f"failure {failure.event} is not of this curriculum: curriculum.pool=none sends nothing to the teacher")

    def requeue(self, failure: Failure) -> None:
        raise ValueError(f"failure {failure.event} is not of this curriculum: curriculum.pool=none sends nothing to the teacher")

    def pending(self) -> int:
        return 0

    def metrics(self) -> Mapping[str, float]:
        return {}

    def state(self, folder: str) -> None:
        write_header(folder, "none", _VERSION, {})

    def restore(self, folder: str) -> None:
        read_header(folder, "none", _VERSION)


def create(config: ml_collections.ConfigDict) -> NoCurriculum:
    return NoCurriculum()
