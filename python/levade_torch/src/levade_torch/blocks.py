"""Attention of trees in blocks of rows, for devices without FlexAttention: a block computes what its rows see and no more.

Columns are cut into parts where branches begin and end, so that a branch leaves out its siblings; a long path is cut as well,
which leaves out what comes after. Masks say the rest.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a part: fewer are not worth a copy, more see too much that is masked.
LEAST, MOST = 32, 256
# Rows of a block: fewer make small products.
ROWS = 128


@dataclass(frozen=True)
class Blocks:
    """`rows`: the number of each block's rows. `parts`: the number of each part's tokens. `columns`: the parts that a block sees, as
    their places, and `masks` [rows, tokens of these parts] which of them.
    """

    rows: list[int]
    parts: list[int]
    columns: list[list[int]]
    masks: list[Tensor]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention of [1, heads, rows, width] queries; returns the same shape."""
        keys, values = key.split(self.parts, dim=2), value.split(self.parts, dim=2)
        found = []
        for rows, columns, mask in zip(query.split(self.rows, dim=2), self.columns, self.masks, strict=True):
            seen = (torch.cat([of[part] for part in columns], dim=2) for of in (keys, values))
            found.append(F.scaled_dot_product_attention(rows, *seen, attn_mask=mask, scale=scale))
        return torch.cat(found, dim=2)


def blocks(end: Tensor, start: int, rows: int, allows) -> Blocks:
    """Blocks of `rows` rows from `start` on. `end` [n] are the subtrees' ends of all tokens; `allows(q, k)` tells whether the token at
    place q sees the one at place k.
    """
    bounds = np.array(cuts(end.cpu().numpy()))
    tokens = torch.arange(len(end), device=end.device)
    found = Blocks([], np.diff(bounds).tolist(), [], [])
    first = start
    while first < start + rows:
        # At the first bound with enough rows before it.
        last = min(int(bounds[min(np.searchsorted(bounds, first + ROWS), len(bounds) - 1)]), start + rows)
        seen = allows(tokens[first:last, None], tokens[None])
        some = np.logical_or.reduceat(seen.any(0).cpu().numpy(), bounds[:-1])
        columns = np.flatnonzero(some).tolist()
        found.rows.append(last - first)
        found.columns.append(columns)
        found.masks.append(torch.cat([seen[:, bounds[part] : bounds[part + 1]] for part in columns], dim=1))
        first = last
    return found


def cuts(end: np.ndarray) -> list[int]:
    """Bounds of parts: where branches begin and end, but for parts that would be too short, and within those too long."""
    count = len(end)
    wanted = np.flatnonzero(end[1:] != end[:-1]) + 1
    bounds = [0]
    for at in [*wanted.tolist(), count]:
        # The last part may be as short as it is.
        if at - bounds[-1] < LEAST and at != count:
            continue
        while at - bounds[-1] > MOST:
            bounds.append(bounds[-1] + MOST)
        bounds.append(at)
    return bounds
