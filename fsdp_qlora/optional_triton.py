"""Triton, if there is one: it comes with CUDA builds of torch only.

Without it `triton` and `tl` are None. quant/triton_trial.py says whether its kernels can be used.
"""

from typing import Any

try:
    import triton
    import triton.language
except ImportError:
    triton = None

tl: Any = triton and triton.language
