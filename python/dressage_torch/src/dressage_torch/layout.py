"""Layout of a batch on a rank: which of its tokens the rank computes, and who sees whom.

With context parallelism every rank of a group computes an equal run of the packed tokens (the batch is padded with tokens that see
only themselves), and gathers the keys and values of the others.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .batch import TreeBatch


@dataclass
class Context:
    """Ranks that share a batch by its tokens."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


@dataclass
class Layout:
    """Tensors of a batch on the device: `tokens` and `positions` [rows] that this rank computes, from `start` on; `end` [n] and
    `position` [n] of all. `trees` are the bounds of whole trees, where the rank computes all of them.
    """

    tokens: Tensor
    positions: Tensor
    start: int
    end: Tensor
    position: Tensor
    trees: list[tuple[int, int]]
    context: Context
    flexible: bool
    masks: dict = field(default_factory=dict)

    @staticmethod
    def of(batch: TreeBatch, context: Context, device: torch.device, flexible: bool) -> "Layout":
        """The layout of a batch; of a single token that is not trained where the batch has none."""
        tokens, position, end = batch.tokens, batch.position, batch.subtree_end
        padding = -len(tokens) % context.size if len(tokens) else context.size
        alone = np.arange(len(tokens), len(tokens) + padding)
        tokens, position, end = (
            np.concatenate(parts)
            for parts in ((tokens, np.zeros_like(alone)), (position, np.zeros_like(alone)), (end, alone + 1))
        )
        rows = len(tokens) // context.size
        mine = slice(context.rank * rows, (context.rank + 1) * rows)
        bounds = TreeBatch(tokens, position, end).roots().tolist()
        return Layout(
            torch.from_numpy(tokens[mine].copy()).to(device),
            torch.from_numpy(position[mine].copy()).to(device),
            mine.start,
            torch.from_numpy(end).to(device),
            torch.from_numpy(position).to(device),
            list(pairwise(bounds)),
            context,
            flexible,
        )

    def allows(self, q: Tensor, k: Tensor, window: int | None) -> Tensor:
        """Whether the token at place q sees the one at place k."""
        seen = (k <= q) & (q < self.end[k])
        if window is not None:
            seen = seen & (self.position[q] - self.position[k] < window)
        return seen

    def dense(self, window: int | None) -> list[tuple[int, int, Tensor]]:
        """Masks for scaled_dot_product_attention: rows first..last of this rank (which see columns first..last) and who sees
        whom, [rows, columns]; one for each tree where the rank computes whole trees.
        """
        if window not in self.masks:
            bounds = self.trees if self.context.size == 1 else [(0, len(self.tokens))]
            self.masks[window] = [(first, last, self._mask(first, last, window)) for first, last in bounds]
        return self.masks[window]

    def _mask(self, first: int, last: int, window: int | None) -> Tensor:
        rows = torch.arange(first, last, device=self.end.device) + self.start
        columns = rows if self.context.size == 1 else torch.arange(len(self.end), device=self.end.device)
        return self.allows(rows[:, None], columns[None], window)

    def blocks(self, window: int | None):
        """The BlockMask of FlexAttention."""
        from torch.nn.attention.flex_attention import create_block_mask

        if ("blocks", window) not in self.masks:

            def sees(_batch, _head, q, k):
                return self.allows(q + self.start, k, window)

            mask = create_block_mask(sees, None, None, len(self.tokens), len(self.end), device=self.end.device)
            self.masks["blocks", window] = mask
        return self.masks["blocks", window]
