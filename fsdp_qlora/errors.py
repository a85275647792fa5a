"""errors_about(): errors that name the file or flag at fault; FatalExample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def errors_about(what: str) -> Iterator[None]:
    """Turn any error of the `with` body, of whatever class, into a ValueError about `what`."""
    try:
        yield
    except Exception as e:
        kind = "" if isinstance(e, (ValueError, OSError)) else f"{type(e).__name__}: "
        raise ValueError(f"{what}: {kind}{e}")


class FatalExample(ValueError):
    """An example that ends the run, because what it asks for would be lost in all examples like it.
    """
