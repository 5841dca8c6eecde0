"""Attention along the sequences of a tree, as an attention function of transformers.

On the CPU, scaled_dot_product_attention computes it with dense masks, block by block; on CUDA, FlexAttention does. The
layout of the batch is passed through the model's keyword arguments, so that recomputed activations see the same
layout.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from .layout import Layout

NAME = "levade_tree"
# Attention options of other model families that change the result. They are not implemented here.
REFUSED = ("softcap", "s_aux")


class GatherTokens(torch.autograd.Function):
    """Gathers all tokens' keys or values [1, heads, n, width] from the ranks. The backward pass reduces their
    gradients.
    """

    @staticmethod
    def forward(ctx, own: Tensor, group, size: int, rank: int) -> Tensor:
        ctx.group, ctx.size, ctx.rank = group, size, rank
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.size, dim=2)[ctx.rank], None, None, None


@cache
def _flex():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def tree_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, tree=None, **options):
    """Computes attention of [1, heads, rows, width] queries to their visible tokens. Returns [1, rows, heads, width]."""
    if tree is None:
        raise NotImplementedError(f"{type(module).__name__} does not pass keyword arguments to its attention")
    if odd := [name for name in REFUSED if options.get(name) is not None]:
        raise NotImplementedError(
            f"{type(module).__name__} asks for attention with {', '.join(odd)}, which training on trees does not support"
        )
    if tree.context.size > 1:
        context = tree.context
        key, value = (GatherTokens.apply(part, context.group, context.size, context.rank) for part in (key, value))
    if tree.flexible:
        grouped = key.shape[1] != query.shape[1]
        mask = tree.block_mask(sliding_window)
        found = _flex()(query, key, value, block_mask=mask, scale=scaling, enable_gqa=grouped)
    else:
        found = dense(tree, query, key, value, scaling, sliding_window)
    return found.transpose(1, 2).contiguous(), None


def dense(tree: Layout, query: Tensor, key: Tensor, value: Tensor, scaling, window: int | None) -> Tensor:
    """Computes attention with dense masks, in blocks of rows."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    return tree.dense(window).attention(query, key, value, scaling)


AttentionInterface.register(NAME, tree_attention)
