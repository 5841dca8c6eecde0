"""FSDP2: weights, gradients and moments in shards, block by block, with their precision and their place.

Embedding, final norm and heads stay with the root, so that the head may run chunk by chunk. Gradients are summed over ranks, never
averaged: normalisers are in the terms' weights.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Precision:
    """`compute` is the type of products; weights that are trained are f32. With `offload` they live in the host's memory, with
    `recompute` activations are computed again in the backward pass.
    """

    compute: torch.dtype
    offload: bool
    recompute: bool


def shard(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, precision: Precision) -> None:
    """Shards a model over a mesh, and experts that ranks share out over the ranks that have the same ones."""
    options = {}
    if precision.compute is torch.bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if precision.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for module in model.modules():
        if getattr(module, "_is_expert_parallel", False):
            fully_shard(module, mesh=expert_mesh, **options)
    for layer in model.base_model.layers:
        # Layers of other stages are empty.
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # In this order: gloo has no sum that is scaled on the way.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
