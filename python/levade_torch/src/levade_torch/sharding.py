"""FSDP2: shards weights, gradients and moments, layer by layer, and sets their precision and device.

Embedding, final norm and heads stay with the root module, so that the head can run in chunks. Gradients are summed
over ranks, never averaged: normalizers are part of the terms' weights.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class Precision:
    """Precision and memory options.

    `compute` is the dtype of matrix multiplications; trained weights are f32. `offload` keeps the weights in host
    memory. `recompute` recomputes activations in the backward pass.
    """

    compute: torch.dtype
    offload: bool
    recompute: bool


def shard(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, precision: Precision) -> None:
    """Shards a model over `mesh`, and experts over the ranks that hold the same experts."""
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
            # Called in this order, since gloo has no pre-scaled sum.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
