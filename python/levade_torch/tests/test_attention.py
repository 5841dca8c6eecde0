"""Checks attention visibility with dense masks and in blocks, with windows, and split over ranks."""

import numpy as np
import pytest
import torch

from levade_torch import blocks
from levade_torch.attention import dense
from levade_torch.batch import TreeBatch
from levade_torch.head import Rows, predictions
from levade_torch.layout import Context, Layout

# Two trees: a trunk of three tokens with branches of two and three tokens, and a sequence of two tokens.
BATCH = TreeBatch(
    np.arange(10),
    np.array([0, 1, 2, 3, 4, 3, 4, 5, 0, 1]),
    np.array([8, 8, 8, 5, 5, 8, 8, 8, 10, 10]),
    np.array([3, 5, 5, 9]),
    np.array([2, 2, 2, 8]),
    np.array([1.0, 1.0, 0.5, 1.0], np.float32),
    np.array([0, 1, 2, 3]),
    np.ones(4, np.int64),
)
PATHS = ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7], [8, 9])


def layout(context: Context | None = None) -> Layout:
    return Layout.of(BATCH, context or Context(), torch.device("cpu"), False)


def seen(window: int | None) -> torch.Tensor:
    """Computes the visibility mask from the sequences."""
    mask = torch.zeros(10, 10, dtype=torch.bool)
    for path in PATHS:
        for at, q in enumerate(path):
            for before, k in enumerate(path[: at + 1]):
                mask[q, k] = window is None or at - before < window
    return mask


# Block sizes: minimum and maximum tokens of a part, and rows of a block.
SIZES = [(1, 1, 1), (1, 256, 1), (2, 3, 2), (3, 256, 4), (32, 256, 128)]


@pytest.fixture(params=SIZES)
def sizes(request, monkeypatch):
    """Uses small blocks, so that a small batch has several."""
    for name, size in zip(("LEAST", "MOST", "ROWS"), request.param, strict=True):
        monkeypatch.setattr(blocks, name, size)


def shown(found: blocks.Blocks) -> torch.Tensor:
    """Assembles the mask of all rows and columns from the masks of blocks."""
    bounds = np.cumsum([0, *found.parts])
    mask, first = torch.zeros(sum(found.rows), sum(found.parts), dtype=torch.bool), 0
    for rows, columns, seen in zip(found.rows, found.columns, found.masks, strict=True):
        indices = np.concatenate([np.arange(bounds[part], bounds[part + 1]) for part in columns])
        mask[first : first + rows, indices] = seen
        first += rows
    return mask


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.usefixtures("sizes")
def test_tokens_see_their_ancestors(window):
    assert (shown(layout().dense(window)) == seen(window)).all()


def test_blocks_skip_siblings_and_later_tokens():
    # A trunk of 100 tokens with branches of 200 and 300, and a sequence of 600.
    end = torch.tensor([600] * 100 + [300] * 200 + [600] * 300 + [1200] * 600)
    found = Layout(torch.zeros(1200), torch.zeros(1200), 0, end, torch.arange(1200), Context(), False).dense(None)
    assert found.parts == [100, 200, 256, 44, 256, 256, 88]
    assert found.rows == [300, 256, 300, 256, 88]
    assert found.columns == [[0, 1], [0, 2], [0, 2, 3, 4], [4, 5], [4, 5, 6]]


@pytest.mark.parametrize("window", [None, 2])
def test_blocks_match_dense_mask(window):
    from torch.nn.attention.flex_attention import create_mask

    found = create_mask(layout().block_mask(window).mask_mod, None, None, 10, 10, device="cpu")
    assert (found[0, 0] == seen(window)).all()


@pytest.mark.usefixtures("sizes")
def test_context_ranks_match_single_rank():
    wanted = torch.eye(12, dtype=torch.bool)
    wanted[:10, :10] = seen(None)
    for rank in range(4):
        assert (shown(layout(Context(4, rank)).dense(None)) == wanted[3 * rank : 3 * rank + 3]).all()


@pytest.mark.usefixtures("sizes")
def test_block_attention_matches_dense_attention():
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 10, 16), torch.randn(1, 2, 10, 16), torch.randn(1, 2, 10, 16)
    ours = dense(layout(), query, key, value, 0.3, 4)
    theirs = flex_attention(query, key, value, block_mask=layout().block_mask(4), scale=0.3, enable_gqa=True)
    assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_targets_of_one_temperature_share_head_row(chunk):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 10, bias=False), torch.randn(10, 8, requires_grad=True)
    rows = Rows.of(BATCH, layout())
    assert rows.hidden.tolist() == [2, 2, 8] and rows.place.tolist() == [2, 0, 1, 3]
    found = predictions(head, hidden, rows, chunk, True)
    logits = head(hidden)[torch.from_numpy(BATCH.predictor)] / torch.from_numpy(BATCH.temperature)[:, None]
    logp = logits.log_softmax(-1)
    place = torch.from_numpy(rows.place)
    tokens = torch.from_numpy(BATCH.tokens[BATCH.target_token])
    wanted = (logp.gather(1, tokens[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp.exp().square().sum(-1))
    for ours, theirs in zip((found.logprobs, found.entropies, found.concentrations), wanted, strict=True):
        assert (ours - theirs[place]).abs().max() < 1e-6
    weights = torch.randn(4)
    ours = torch.autograd.grad((weights * (found.logprobs + 0.3 * found.entropies)).sum(), (hidden, head.weight))
    theirs = torch.autograd.grad((weights * (wanted[0] + 0.3 * wanted[1])[place]).sum(), (hidden, head.weight))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-6


def test_rank_without_targets_has_head_gradients():
    head, hidden = torch.nn.Linear(8, 10, bias=False), torch.randn(10, 8, requires_grad=True)
    none = TreeBatch(BATCH.tokens, BATCH.position, BATCH.subtree_end)
    found = predictions(head, hidden, Rows.of(none, layout()), 4, False)
    assert found.logprobs.shape == (0,)
    found.logprobs.sum().backward()
    assert (head.weight.grad == 0).all() and (hidden.grad == 0).all()
