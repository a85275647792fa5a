"""fused_kernel(): compile a function to one kernel on a GPU."""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fsdp_qlora.quant.triton_trial import why_no_triton

Result = TypeVar("Result")

LARGE_BYTES = 2**30  # of a tensor; kernels of larger ones are compiled without trying block sizes


def fused_kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator: compile the function to one kernel on a GPU; not on a CPU, where compiling takes
    minutes.

    When a size differs from the first call's, torch compiles again, now for any size. A kernel for
    any width is half as fast, because it divides to find each value's place. So each width has its
    own kernel, in which only the number of rows may vary. Evaluations have their own kernels, too,
    because their lengths must not change training's kernels, nor the last bit of its results. (One
    kernel for all lengths from the start cost 2 % of a step of Llama-3-8B on an H200.) With
    `dynamic` it is one kernel from the start, for tensors whose lengths vary in any case. See also
    use_dynamic_shapes(). An argument with `has_own_kernel` has one for each of its values.
    """
    numbers = itertools.count()

    @functools.cache
    def compiled(is_large: bool, *kind: Any) -> Callable[..., Result]:
        name = f"{function.__name__}_{next(numbers)}"
        # torch tries some sizes of blocks. For that it copies what a function overwrites to pinned
        # host memory, which it keeps: 84 GiB for a row of 262,144 tokens of Qwen3.5-9B
        options = {"triton.autotune_pointwise": False} if is_large else None
        return compiled_copy(function, name, options)

    @functools.wraps(function)
    def call(*args: Any, is_evaluation: bool = False, dynamic: bool = False) -> Result:
        if not args[0].is_cuda or why_no_triton():
            return function(*args)
        tensors = [x for x in args if isinstance(x, Tensor) and x.dim()]
        for tensor in tensors:
            if (dynamic or _uses_dynamic_shapes) and len(tensor) == len(args[0]):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        widths = ((x.shape[1:], x.stride(0)) for x in tensors)
        own = (x for x in args if getattr(x, "has_own_kernel", False))  # see LimitedActivation
        is_large = max(x.nbytes for x in tensors) >= LARGE_BYTES
        n_compiled = compiled.cache_info().misses
        result = compiled(is_large, is_evaluation, dynamic, *own, *widths)(*args)
        if compiled.cache_info().misses > n_compiled:
            # compiling leaves objects that keep the frames of all callers alive, and so the tensors
            # in them: 2.8 GiB in the first step of GLM-4.7-Flash with a row of 32,768 tokens
            gc.collect()
        return result

    return call


_uses_dynamic_shapes = False  # set only by use_dynamic_shapes()


def use_dynamic_shapes() -> None:
    """Compile all kernels from now on for any number of rows, for a run whose rows differ in
    length. Otherwise each would be compiled twice, for its first micro-batch and for any; that took
    Qwen3.5-9B's first step from 34 to 51 s (H100)."""
    global _uses_dynamic_shapes
    _uses_dynamic_shapes = True


def compiled_copy(
    function: Callable[..., Result], name: str, options: dict[str, Any] | None = None
) -> Callable[..., Result]:
    """Return a compiled copy of a function, with these options of Inductor. To torch it is another
    function, because it has another code object."""
    return torch.compile(types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__), options=options)
