"""Keys and tokens of this machine, taken out of every text that is kept or shown."""

import os
import re

_NAME = re.compile(r"(^|_|API)(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)  # of an environment variable
_SHORTEST = 6  # characters; what is shorter, like EMPTY, is a word that says "none"
_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # user and password of an address
_registered: set[str] = set()


def register(secret: str) -> None:
    """Adds a secret whose variable has an unusual name."""
    _registered.add(secret)


def redact(text: str) -> str:
    """The text without the values of environment variables that are named like keys, registered secrets, or users in addresses.

    Paths (of key files) stay.
    """
    values = " ".join({value for name, value in os.environ.items() if _NAME.search(name)} | _registered).split()
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST and not value.startswith("/"):
            text = text.replace(value, "[redacted]")
    return _USER.sub("[redacted]", text)
