"""The language model head on predictor tokens: log-probability, entropy and Σ p², one chunk of rows at a time.

A row of the head is a predictor at one temperature. If the tree branches there, a row has several targets. Logits
exist for one chunk of rows at a time, and the backward pass recomputes them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batch import TreeBatch
from .layout import Layout


@dataclass
class Rows:
    """Targets of a batch that this rank predicts, sorted by rows.

    Per target [t]: its index among all targets, its row, its token id. Per row [r]: the row of the hidden states, and
    the temperature.
    """

    place: np.ndarray
    row: np.ndarray
    token: np.ndarray
    hidden: np.ndarray
    temperature: np.ndarray

    @staticmethod
    def of(batch: TreeBatch, layout: Layout) -> "Rows":
        """Selects the targets whose predictors this rank computes."""
        start, end = layout.start, layout.start + len(layout.tokens)
        place = np.flatnonzero((batch.predictor >= start) & (batch.predictor < end))
        predictor, temperature = batch.predictor[place], batch.temperature[place]
        order = np.lexsort((temperature, predictor))
        place, predictor, temperature = place[order], predictor[order], temperature[order]
        new = np.ones(len(place), bool)
        new[1:] = (predictor[1:] != predictor[:-1]) | (temperature[1:] != temperature[:-1])
        first = np.flatnonzero(new)
        token = batch.tokens[batch.target_token[place]]
        return Rows(place, np.cumsum(new) - 1, token, predictor[first] - start, temperature[first])


@dataclass
class TokenPredictions:
    """Per target [t], f32: log-probability and entropy (both differentiable), and Σ p²."""

    logprobs: Tensor
    entropies: Tensor
    concentrations: Tensor


def predictions(head: nn.Module, hidden: Tensor, rows: Rows, chunk: int, entropy_moves: bool) -> TokenPredictions:
    """Runs the head on the rows of `hidden` [n, width].

    Without targets, the result is empty but depends on the head, so that all ranks have gradients of the same
    parameters.
    """
    device = hidden.device
    if not len(rows.place):
        nothing = head(hidden[:1]).float().sum() * 0.0 + torch.zeros(0, device=device)
        return TokenPredictions(nothing, nothing, nothing.detach())
    parts = []
    for start in range(0, len(rows.hidden), chunk):
        chosen = slice(start, start + chunk)
        first, last = np.searchsorted(rows.row, [start, start + chunk])
        row, token = (torch.from_numpy(a[first:last]).to(device) for a in (rows.row - start, rows.token))
        temperature = torch.from_numpy(rows.temperature[chosen]).to(device)
        states = hidden[torch.from_numpy(rows.hidden[chosen]).to(device)]
        arguments = (head, states, temperature, row, token, entropy_moves)
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk(*arguments))
    return TokenPredictions(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _chunk(head, states: Tensor, temperature: Tensor, row: Tensor, token: Tensor, entropy_moves: bool):
    logits = head(states).float() / temperature[:, None]
    normaliser = logits.logsumexp(-1)
    with torch.set_grad_enabled(entropy_moves and torch.is_grad_enabled()):
        probabilities = (logits - normaliser[:, None]).exp()
        entropy = normaliser - (probabilities * logits).sum(-1)
        concentration = (probabilities * probabilities).sum(-1).detach()
    return logits[row, token] - normaliser[row], entropy[row], concentration[row]


def values(head: nn.Module, hidden: Tensor, rows: Rows) -> Tensor:
    """Computes a critic's values of the states before the targets, f32 [t]."""
    if not len(rows.place):
        return head(hidden[:1]).float().sum() * 0.0 + torch.zeros(0, device=hidden.device)
    states = hidden[torch.from_numpy(rows.hidden[rows.row]).to(hidden.device)]
    return head(states).float()[:, 0]
