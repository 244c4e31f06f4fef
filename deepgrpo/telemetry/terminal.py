"""The console that this program's tables, trees and progress are printed on."""

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.segment import Segment

from deepgrpo.config.errors import shown


class Console(rich.console.Console):
    """Rich's, but a text's own control characters are shown, not sent: texts are of models and of files, and may hold any."""

    def render(self, *arguments: Any, **keys: Any) -> Iterable[Segment]:
        for segment in super().render(*arguments, **keys):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def on_broken_pipe(self) -> None:
        """Rich's own ends the program; here the caller decides (`no_end`, `tool`)."""
        raise  # noqa: PLE0704  the error that it was called for
