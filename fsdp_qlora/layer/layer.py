"""A decoder layer: one autograd function with a hand-written backward.

Start at LayerFunction. spec.py says which two sublayers a layer has.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.layer.call import LayerCall, LayerInputs
from fsdp_qlora.layer.offload import Take, put_saved
from fsdp_qlora.layer.parameters import LayerParameters
from fsdp_qlora.layer.router import RoutingChoice
from fsdp_qlora.layer.saved import SavedMixerSublayer, SavedMLP, SavedMoE
from fsdp_qlora.layer.spec import LayerSpec


class DecoderLayer(LayerParameters):
    """The forward of a decoder layer, on the parameters of LayerParameters. It is an FSDP2 unit."""

    spec: LayerSpec

    def forward(self, x: Tensor, inputs: LayerInputs, *kv_in: Tensor) -> tuple[Tensor, ...]:
        """Return the layer's output; if the layer shares its keys and values, also these, [tokens,
        heads, head_dim]. `kv_in`: the keys and values of its kv_source."""
        # asked here because inside LayerFunction.forward() it is always False, and needs_input_grad
        # does not tell an evaluation from training
        is_evaluation = not torch.is_grad_enabled()
        # the adapter is an argument so that autograd asks for its gradient
        return LayerFunction.apply(x, self.adapter, self, inputs, is_evaluation, *kv_in)


@dataclasses.dataclass
class SavedLayer:
    """What a layer saves for backward, see LayerFunction; the rest is None."""

    # each takes from the store, once; SAVE_ATTENTION: take_x() also takes attention's results
    take_x: Take | None = None
    take_mid_residual: Take | None = None
    take_mlp: Callable[[], SavedMLP] | None = None
    mixer_sublayer: SavedMixerSublayer | None = None
    mlp_sublayer: SavedMLP | SavedMoE | None = None
    routing_choices: list[RoutingChoice] | None = None  # one per slice of tokens


class LayerFunction(torch.autograd.Function):
    """Forward and backward of a decoder layer, from x [tokens, hidden] to the same shape: a token
    mixer, after which the sum is `mid_residual`, then the MLP.

    layer.save_policy, which the Plan decides, is what forward saves; see SavePolicy (plan.py) for
    what backward computes again. A parallel layer, whose MLP reads x, has SAVE_ALL or SAVE_INPUT; a
    layer with experts never has SAVE_MLP. The choice of experts is saved in any case. Backward
    reads the parameters from the layer, where FSDP2 has gathered them again by then.

    Keys and values that later layers read are outputs of this function and inputs of theirs, so
    that autograd sums their gradients. They stay on the GPU, and no layer recomputes those of
    another.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapter: Tensor, layer: DecoderLayer, inputs: LayerInputs,
        is_evaluation: bool, *kv_in: Tensor
    ) -> tuple[Tensor, ...]:
        # ctx.saved, not save_for_backward(): backward must be able to free each tensor as soon as
        # it has used it, and offloaded tensors are in the store
        ctx.layer = layer
        ctx.inputs = inputs
        x = x.detach()
        ctx.kv_in = tuple(part.detach() for part in kv_in)
        call = LayerCall(layer, inputs, ctx.kv_in, is_evaluation=is_evaluation)
        put, policy = inputs.store.put, layer.save_policy
        mixer, mlp = layer.spec.mixer_sublayer, layer.spec.mlp_sublayer
        parallel = layer.arch.parallel_residual
        if policy.mixer:
            mid_residual, mixer_saved = mixer.forward(call, x)
            out, mlp_saved = mlp.forward(call, mid_residual, x if parallel else mid_residual)
            ctx.saved = SavedLayer(mixer_sublayer=mixer_saved, mlp_sublayer=mlp_saved)
            return call.times_layer_scalar(out), *call.kv_out
        # put() and the Take that it returns move activations to the host and back, if offloaded
        ctx.saved = saved = SavedLayer()
        if not policy.attention:
            saved.take_x = put(x)  # copied while the mixer runs
        mid_residual = mixer.forward(call, x)[0]
        if policy.attention:  # in one put(), because backward needs both at once
            saved.take_x = put(x, *itertools.chain(*call.attention_results))
            call.attention_results.clear()  # the store frees them
        if policy.mlp:
            out, mlp_saved = mlp.forward(call, mid_residual, mid_residual)
            saved.take_mlp = put_saved(inputs.store, mlp_saved)
            return call.times_layer_scalar(out), *call.kv_out
        if policy.mid_residual:
            saved.take_mid_residual = put(mid_residual)
        out, saved.routing_choices = mlp.forward_in_slices(
            call, mid_residual, x if parallel else mid_residual)
        return call.times_layer_scalar(out), *call.kv_out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_kv_out: Tensor) -> tuple[Tensor | None, ...]:
        layer, inputs, saved = ctx.layer, ctx.inputs, ctx.saved
        call = LayerCall(layer, inputs, ctx.kv_in, is_backward=True)
        policy = layer.save_policy
        ctx.saved = None
        ctx.kv_in = ()
        call.grad_kv_out = grad_kv_out
        mixer, mlp = layer.spec.mixer_sublayer, layer.spec.mlp_sublayer
        parallel = layer.arch.parallel_residual
        grad = call.times_layer_scalar(grad)
        if policy.mixer:
            mixer_saved = saved.mixer_sublayer
            grad_mid_residual = mlp.backward(call, saved.mlp_sublayer, grad)
        elif not policy.recomputes_mid_residual:
            if policy.mlp:
                grad_mid_residual = mlp.backward(call, saved.take_mlp(), grad)
            else:
                (mid_residual,) = saved.take_mid_residual()
                grad_mid_residual = mlp.backward_in_slices(
                    call, mid_residual, grad, saved.routing_choices)
                del mid_residual
            (x,) = saved.take_x()  # copied back while the MLP ran
            mixer_saved = mixer.forward(call, x, wants_sum=False)[1]
        else:
            x, *results = saved.take_x()
            call.saved_attention_results = list(zip(results[::2], results[1::2]))
            # mixer.backward() frees attention's results, one group of heads after the other
            del results
            mid_residual, mixer_saved = mixer.forward(call, x, wants_sum=not parallel)
            call.dequantized.clear()  # room for the MLP's weights
            grad_mid_residual = mlp.backward_in_slices(
                call, x if parallel else mid_residual, grad, saved.routing_choices)
            del mid_residual
        # in a parallel layer the mixer gets the gradient of the layer's sum, and grad_mid_residual
        # already includes the gradient of x through the MLP
        upstream = grad if parallel else grad_mid_residual
        wants_grad_x = ctx.needs_input_grad[0]
        grad_x = mixer.backward(call, mixer_saved, upstream, grad_mid_residual, wants_grad_x)
        return grad_x, call.grad_adapter, None, None, None, *call.grad_kv_in
