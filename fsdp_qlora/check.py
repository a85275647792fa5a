"""The check at start: two small layers of the user's own model here and in transformers.

Stands on model, families and data. The function that loads weights is given by the script, so that
what it does is checked as well.
"""

import types

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM

from fsdp_qlora.data.bins import make_bin
from fsdp_qlora.data.encode import rows_of
from fsdp_qlora.elementwise import normalise
from fsdp_qlora.families import describe_model, rope_frequencies, shrunk_config
from fsdp_qlora.attention import document_attention
from fsdp_qlora.layer import make_layouts
from fsdp_qlora.model import Model, set_local
from fsdp_qlora.nf4 import dequantise
from fsdp_qlora.offload import GPUStore
from fsdp_qlora.plan import Plan
from fsdp_qlora.vocabulary import scaled_logits
from fsdp_qlora.weights import tensor_names

LENGTHS = 24, 21  # tokens of two documents in one bin


@torch.no_grad()
def check_family(model_config, name, fill_model):
    """Compare logits and loss of a shrunk model, in fp32 on the CPU, with transformers'. Raises
    ValueError where they differ. Rank 0 only."""
    small = shrunk_config(model_config)
    arch = describe_model(small)
    generator = torch.Generator().manual_seed(0)
    reference = random_reference(small, generator)
    model = plain_model(small, arch, dict(reference.state_dict()), max(LENGTHS), fill_model)
    copy_weights(model, reference)
    ids = torch.randint(3, arch.vocab_size, (sum(LENGTHS),), generator=generator)
    documents = ids.split(LENGTHS)
    logits = [reference(document[None]).logits[0].float() for document in documents]
    loss = sum(F.cross_entropy(rows[:-1], document[1:], reduction="sum")
               for rows, document in zip(logits, documents))
    bin = make_bin(rows_of([(ids, ids) for ids in documents]), [[0, 1]], 0, None, plain_run(model))
    hidden = model.hidden(bin)
    normed = torch.empty_like(hidden)
    normalise(normed, hidden, model.norm, arch.norm, arch.norm_eps)
    here = scaled_logits(normed @ model.head.t(), arch.logits_multiplier, arch.logits_softcap)
    loss_here = model(bin)
    off = (here - torch.cat(logits)).norm() / torch.cat(logits).norm()
    if not (off < 1e-4 and abs(loss_here - loss) < 1e-4 * loss):
        kinds = sorted(set(map(str, zip(arch.layer_window, arch.layer_rope))))
        raise ValueError(
            f"--model {name}: the check at start failed: {arch.family} with layers {kinds}"
            f" (window, rotary) gives logits that are {off:.1e} from those of transformers"
            f" {transformers.__version__}, and a loss of {loss_here:.6f}, not {loss:.6f}: please"
            " report this")


def random_reference(model_config, generator):
    """transformers' model in fp32 with random norms and biases: 1 and 0 would hide mistakes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation="eager",
            trust_remote_code=False).eval()
    for p in reference.parameters():
        if p.dim() == 1:
            p += torch.empty_like(p).normal_(0, 0.2, generator=generator)
    return reference


def plain_model(model_config, arch, tensors, max_seq_len, fill_model):
    """A Model of this process alone, in fp32 on the CPU, from {name in a checkpoint: tensor}."""
    no_adapter = types.SimpleNamespace(lora_rank=1, lora_alpha=1, lora_dropout=0.0, adapter="lora")
    plan = Plan(
        compute_dtype="float32", n_layers=arch.n_layers, shard_group_size=1,
        reshard_after_forward=True, bin_tokens=64, recomputed=0, keep_middle=False,
        hold_weights=False, offload_activations=False, offload_params=False)
    model = Model(arch, make_layouts(arch, (), no_adapter), plan)
    fill_model(model, tensor_names(arch, tensors), lambda name: tensors[name].flatten(), {},
               torch.device("cpu"))
    for layer in model.layers:
        set_local(layer, "adapter", torch.zeros(len(layer.adapter)))
    model.frequencies = [
        rope_frequencies(rope, arch, max_seq_len, model_config) for rope in arch.ropes]
    return model


def plain_run(model):
    """What make_bin() needs of a run on a CPU."""
    same = dict.fromkeys(("full", "window"), document_attention)
    return types.SimpleNamespace(device=torch.device("cpu"), store=GPUStore(), plan=model.plan,
                                 kernels={"same": same, "any": same})


def copy_weights(model, reference):
    """Give the reference the weights that the model computes with, which NF4 has rounded."""
    for i, layer in enumerate(model.layers):
        for fused in layer.layout.fused_linears:
            weight = dequantise(layer, fused, layer.adapter)
            for place in fused.places:
                target = reference.get_parameter(f"model.layers.{i}.{place.linear.name}.weight")
                target.copy_(weight[place.outputs, : fused.in_features])
