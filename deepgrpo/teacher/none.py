"""A run without a teacher: it is started, served and measured like one that has a teacher, and nothing comes of it."""

from typing import Any


class NoTeacher:
    """Has the methods of `TeacherWorker` that the training loop calls. step: of the training loop."""

    step = 0

    def start(self) -> None:
        pass

    def serve(self, step: int, deadline: float, timer: Any) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {}

    def stop(self) -> bool:
        return True
