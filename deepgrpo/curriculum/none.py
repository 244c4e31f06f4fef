"""The curriculum without states: plain GRPO on the dataset's prompts."""

import ml_collections

from deepgrpo.curriculum.base import Curriculum
from deepgrpo.curriculum.header import read_header, write_header

_VERSION = 1


class NoCurriculum(Curriculum):
    """Keeps nothing and gives nothing."""

    def state(self, folder: str) -> None:
        write_header(folder, "none", _VERSION, {})

    def restore(self, folder: str) -> None:
        read_header(folder, "none", _VERSION)


def create(config: ml_collections.ConfigDict) -> NoCurriculum:
    return NoCurriculum()
