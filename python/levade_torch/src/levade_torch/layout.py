"""Layout of a batch on a rank: which tokens the rank computes, and which tokens see which.

With context parallelism, every rank of a context group computes a run of packed tokens of equal length, and gathers
the keys and values of the other ranks. Padding tokens see only themselves.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TreeBatch
from .blocks import Blocks, blocks


@dataclass
class Context:
    """The ranks that split a batch by its tokens."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass
class Layout:
    """Tensors of a batch on the device.

    `tokens` and `positions` [rows] are those that this rank computes, starting at `start`. `end` [n] and `position`
    [n] are those of all tokens.
    """

    tokens: Tensor
    positions: Tensor
    start: int
    end: Tensor
    position: Tensor
    context: Context
    flexible: bool
    masks: dict = field(default_factory=dict)

    @staticmethod
    def of(batch: TreeBatch, context: Context, device: torch.device, flexible: bool) -> "Layout":
        """Creates the layout of a batch. An empty batch becomes a single token that is not trained."""
        tokens, position, end = batch.tokens, batch.position, batch.subtree_end
        padding = -len(tokens) % context.size if len(tokens) else context.size
        alone = np.arange(len(tokens), len(tokens) + padding)
        tokens, position, end = (
            np.concatenate(parts)
            for parts in ((tokens, np.zeros_like(alone)), (position, np.zeros_like(alone)), (end, alone + 1))
        )
        rows = len(tokens) // context.size
        mine = slice(context.rank * rows, (context.rank + 1) * rows)
        return Layout(
            torch.from_numpy(tokens[mine].copy()).to(device),
            torch.from_numpy(position[mine].copy()).to(device),
            mine.start,
            torch.from_numpy(end).to(device),
            torch.from_numpy(position).to(device),
            context,
            flexible,
        )

    def allows(self, q: Tensor, k: Tensor, window: int | None) -> Tensor:
        """Returns whether the token at index q sees the token at index k."""
        seen = (k <= q) & (q < self.end[k])
        if window is not None:
            seen = seen & (self.position[q] - self.position[k] < window)
        return seen

    def dense(self, window: int | None) -> Blocks:
        """Returns the blocks of this rank's rows, with masks for scaled_dot_product_attention."""
        if window not in self.masks:
            allows = partial(self.allows, window=window)
            self.masks[window] = blocks(self.end, self.start, len(self.tokens), allows)
        return self.masks[window]

    def block_mask(self, window: int | None):
        """Returns the BlockMask for FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        if ("blocks", window) not in self.masks:

            def sees(_batch, _head, q, k):
                return self.allows(q + self.start, k, window)

            mask = create_block_mask(sees, None, None, len(self.tokens), len(self.end), device=self.end.device)
            self.masks["blocks", window] = mask
        return self.masks["blocks", window]
