"""Base weight and LoRA adapter as one matmul, forward and backward; DoRA's scaling.

y = x W.T + s x A.T B.T is one matmul, [x, lora_hidden] [W, B].T with lora_hidden = s x A.T: the
adapter costs a few columns, not a pass over y. lora_hidden [n, lora_width] has the columns of all
linears side by side; with padding, it is the last columns of the inputs [n, input_width]. In
backward, the gradient of y times [W, B] is the gradient of [x, lora_hidden]. The gradient of
lora_hidden then yields the gradient of A, and the part of x's gradient that passes through A.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear


# a Tensor; None where the caller did not ask for it. Any, so that one who asked needs no assert
MaybeTensor = Tensor | Any


def widen(x: Tensor, fused: FusedLinear) -> Tensor:
    """Return a new tensor [n, fused.input_width] with x [n, in] in its first columns."""
    wide = x.new_empty(len(x), fused.input_width)
    wide[:, : fused.in_features] = x
    return wide


def fill_lora_hidden(call: LayerCall, fused: FusedLinear, inputs: Tensor) -> None:
    """Write lora_hidden = s x A.T of all adapted linears into the last columns of inputs [n,
    input_width]."""
    if not fused.lora_width:
        return
    x, lora_hidden = inputs[:, : fused.in_features], inputs[:, fused.in_features :]
    a = call.adapter[fused.lora_a].view(-1, fused.in_features)
    dropped = call.drop(x, call.layer_spec.dropout, fused.dropout_site)
    lora_hidden.zero_()  # torch 2.13 on a CPU reads `out` even with beta=0, and 0 * NaN is NaN
    torch.addmm(a.new_zeros(()), dropped, a.t(), beta=0, alpha=call.layer_spec.scaling,
                out=lora_hidden[:, : fused.lora_width])


def lora_matmul(
    call: LayerCall, fused: FusedLinear, inputs: Tensor, wants_output: bool = True
) -> tuple[MaybeTensor, Tensor]:
    """Return the outputs [n, out] of linears with their adapters, None without wants_output; and
    a copy of lora_hidden and its padding [n, padded_lora_width], for lora_matmul_backward(). Fills
    the last columns of inputs [n, input_width]."""
    fill_lora_hidden(call, fused, inputs)
    out = matmul_with_lora_hidden(call, fused, inputs) if wants_output else None
    return out, inputs[:, fused.in_features :].clone()


def matmul_with_lora_hidden(call: LayerCall, fused: FusedLinear, inputs: Tensor) -> Tensor:
    """Return lora_matmul()'s outputs [n, out], from inputs [n, input_width] with lora_hidden in
    the last columns."""
    if len(fused.splits) == 1:
        return _matmul_of_split(call, fused, inputs)
    out = inputs.new_empty(len(inputs), fused.out_features)
    for split in fused.splits:
        if inputs.is_cuda and split.bias is None and not call.layer_spec.dora:
            torch.mm(inputs, call.weight(split).t(), out=out[:, split.outputs])  # without a copy
        else:
            out[:, split.outputs] = _matmul_of_split(call, split, inputs)
    return out


def _matmul_of_split(call: LayerCall, fused: FusedLinear, inputs: Tensor) -> Tensor:
    bias = None if fused.bias is None else call.layer.vectors[fused.bias][fused.outputs]
    weight = call.weight(fused)
    if not call.layer_spec.dora or not fused.adapted:
        return F.linear(inputs, weight, bias)
    factor, _ = dora_factors(call, fused, weight)
    return scale_columns(inputs @ weight.t(), factor, bias, is_evaluation=call.is_evaluation)


@fused_kernel
def scale_columns(y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [n, out] * factor [out] + bias [out] or None."""
    y32 = y.float() * factor
    return (y32 if bias is None else y32 + bias).to(y.dtype)


def lora_matmul_backward(
    call: LayerCall, fused: FusedLinear, lora_hidden: Tensor, grad: Tensor, x: Tensor,
    wants_grad_x: bool = True
) -> MaybeTensor:
    """Return the gradient of x [n, in], None without wants_grad_x, from `grad`, the gradient of the
    outputs [n, out]. Adds the gradients of A, of B and of DoRA's magnitudes to call.grad_adapter.
    `lora_hidden`: lora_matmul()'s second result."""
    grad_x, grad_lora_hidden = input_gradients(call, fused, lora_hidden, grad, x, wants_grad_x)
    add_a_gradient(call, fused, x, grad_lora_hidden)
    return grad_x


def input_gradients(
    call: LayerCall, fused: FusedLinear, lora_hidden: Tensor, grad: Tensor, x: Tensor | None,
    wants_grad_x: bool = True
) -> tuple[MaybeTensor, Tensor]:
    """The first half of lora_matmul_backward(), for an x that is recomputed after it; only DoRA
    reads x here. Returns the gradients of x and of lora_hidden [n, lora_width], and adds those of B
    and of DoRA's magnitudes to call.grad_adapter; the second half is add_a_gradient()."""
    n_in = fused.in_features
    spec = call.layer_spec
    grad_inputs = None
    for split in fused.splits:
        weight = call.weight(split)
        part = grad[:, split.outputs]
        if spec.dora and split.adapted:
            # y = c u + bias with c = m / norm; like PEFT, treat the norm as a constant
            factor, norm = dora_factors(call, split, weight)
            u = torch.addmm(x @ weight[:, :n_in].t(), lora_hidden, weight[:, n_in:].t())
            sums = (part.float() * u.float()).sum(0) / norm
            for linear in split.adapted:
                call.grad_adapter[linear.magnitude] += sums[split.relative_outputs(linear)]
            part = scale_columns(part, factor, None)
        used = weight if wants_grad_x else weight[:, n_in:]
        if grad_inputs is not None:
            grad_inputs.addmm_(part, used)
        elif part.is_cuda:
            grad_inputs = part @ used
        else:  # bf16 matmuls take 200 times as long on CPUs without AVX-512
            grad_inputs = fp32_matmul(part, used).to(part.dtype)
        del weight, used
        for linear in split.adapted:
            grad_b = call.grad_adapter[linear.lora_b].view(-1, fused.lora_rank)
            outputs = split.relative_outputs(linear)
            grad_b += fp32_matmul(part[:, outputs].t(), lora_hidden[:, linear.lora_columns])
    assert grad_inputs is not None, "there is a split"
    grad_x, grad_lora_hidden = grad_inputs.split([n_in * wants_grad_x, fused.input_width - n_in], 1)
    grad_lora_hidden = grad_lora_hidden[:, : fused.lora_width]
    if not wants_grad_x or not fused.lora_width:
        return grad_x if wants_grad_x else None, grad_lora_hidden
    a = call.adapter[fused.lora_a].view(-1, n_in)  # [lora_width, in]
    if spec.dropout:
        from_lora = spec.scaling * (grad_lora_hidden @ a)
        return grad_x + call.drop(from_lora, spec.dropout, fused.dropout_site), grad_lora_hidden
    return grad_x.addmm_(grad_lora_hidden, a, alpha=spec.scaling), grad_lora_hidden


def add_a_gradient(
    call: LayerCall, fused: FusedLinear, x: Tensor, grad_lora_hidden: Tensor
) -> None:
    """Add the gradient of all A to call.grad_adapter, from x [n, in] and the gradient of
    lora_hidden [n, lora_width]."""
    if fused.lora_width:
        dropped = call.drop(x, call.layer_spec.dropout, fused.dropout_site)
        grad_a = call.grad_adapter[fused.lora_a].view(-1, fused.in_features)
        grad_a.add_(fp32_matmul(grad_lora_hidden.t(), dropped), alpha=call.layer_spec.scaling)


def dora_factors(call: LayerCall, fused: FusedLinear, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return DoRA's factors c = m / norm and the norms ||W + s B A||, both fp32 [out]. Both are 1
    for outputs without an adapter.

    The norm needs no [out, in] tensor of its own: for each row it is the root of ||W||^2 + 2 s B.(W
    A.T) + s^2 B.(B A A.T).
    """
    a = call.adapter[fused.lora_a].view(-1, fused.in_features)
    w_a = fp32_matmul(weight[:, : fused.in_features], a.t())
    scaling = call.layer_spec.scaling
    a = a.float()
    norm = torch.ones(fused.out_features, device=weight.device)
    factor = norm.clone()
    for linear in fused.adapted:
        a_linear = a[linear.lora_columns]
        outputs = fused.relative_outputs(linear)
        b_linear = call.adapter[linear.lora_b].view(-1, fused.lora_rank).float()
        cross = (b_linear * w_a[outputs, linear.lora_columns]).sum(1)
        square = (b_linear @ (a_linear @ a_linear.t()) * b_linear).sum(1)
        norm_w = call.layer.weight_norms[linear.name].square()
        norm[outputs] = (norm_w + 2 * scaling * cross + scaling * scaling * square).sqrt()
        # fp32: bf16 would round the magnitudes, see shard_model()
        magnitude = call.layer.adapter.detach()[linear.magnitude].float()
        factor[outputs] = magnitude / norm[outputs]
    return factor, norm


def fp32_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in fp32, whatever their dtype, so that sums of several products are rounded
    once."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
