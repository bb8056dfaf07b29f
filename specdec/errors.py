"""The one exception a user may see: a sentence that names what is wrong and what to try."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The command line prints the message and exits with code 1."""


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the closest known word, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{match[0]}'?" if match else ""
