"""without_kernels(): transformers' modeling code without optional kernels."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

KERNEL_PACKAGES = "fla", "causal_conv1d"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Let transformers' modeling code be imported without optional kernels in the `with` body. That
    code uses the kernels that are installed when it is imported, and they do not work on a CPU."""
    before = {name: sys.modules.get(name) for name in KERNEL_PACKAGES}
    absent: dict[str, Any] = dict.fromkeys(KERNEL_PACKAGES)  # None: import raises ImportError
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
