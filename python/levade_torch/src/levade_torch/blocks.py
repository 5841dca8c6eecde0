"""Tree attention in blocks of rows, for devices without FlexAttention. A block computes only columns that its rows
see.

Columns are split into parts where branches start and end, so that a branch skips its siblings. Long sequences are
split too, which skips later tokens. Masks handle the rest.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens of a part. A smaller part is not worth a copy; a larger part contains too many masked tokens.
LEAST, MOST = 32, 256
# Minimum number of rows per block. Smaller blocks lead to small matrix multiplications.
ROWS = 128


@dataclass(frozen=True)
class Blocks:
    """Blocks of rows, and the parts of columns that they attend to.

    `rows`: number of rows per block. `parts`: number of tokens per part. `columns`: indices of the parts that a block
    sees. `masks` [rows, tokens of these parts]: which of these tokens each row sees.
    """

    rows: list[int]
    parts: list[int]
    columns: list[list[int]]
    masks: list[Tensor]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Computes attention of [1, heads, rows, width] queries. Returns the same shape."""
        keys, values = key.split(self.parts, dim=2), value.split(self.parts, dim=2)
        found = []
        for rows, columns, mask in zip(query.split(self.rows, dim=2), self.columns, self.masks, strict=True):
            seen = (torch.cat([of[part] for part in columns], dim=2) for of in (keys, values))
            found.append(F.scaled_dot_product_attention(rows, *seen, attn_mask=mask, scale=scale))
        return torch.cat(found, dim=2)


def blocks(end: Tensor, start: int, rows: int, allows) -> Blocks:
    """Creates blocks for `rows` rows, starting at `start`.

    `end` [n] contains the subtree ends of all tokens. `allows(q, k)` returns whether the token at index q sees the
    token at index k.
    """
    bounds = np.array(cuts(end.cpu().numpy()))
    tokens = torch.arange(len(end), device=end.device)
    found = Blocks([], np.diff(bounds).tolist(), [], [])
    first = start
    while first < start + rows:
        # Ends the block at the first bound with enough rows before it.
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
    """Returns the bounds of parts: starts and ends of branches. Short parts are merged, and long parts are split."""
    count = len(end)
    wanted = np.flatnonzero(end[1:] != end[:-1]) + 1
    bounds = [0]
    for at in [*wanted.tolist(), count]:
        # The last part can have any length.
        if at - bounds[-1] < LEAST and at != count:
            continue
        while at - bounds[-1] > MOST:
            bounds.append(bounds[-1] + MOST)
        bounds.append(at)
    return bounds
