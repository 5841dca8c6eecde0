"""Checks at startup that trees and sequences give the same log-probabilities.

Computes a small tree with two branches, and compares each branch with the model's own forward pass. This detects
models that would silently be trained wrongly: layers that mix tokens other than by attention, logits that are scaled
or capped after the head, or a wrong attention kernel.
"""

from functools import partial

import numpy as np
import torch

from .batch import TreeBatch
from .errors import StartError
from .learner import Learner

# Maximum difference of a log-probability.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
TRUNK, BRANCHES = 9, (8, 9)


def tree(vocabulary: int) -> tuple[TreeBatch, list[np.ndarray]]:
    """Returns a trunk with two branches, in which all tokens except the first are targets, and its two sequences."""
    trunk = (7 * np.arange(TRUNK) + 3) % vocabulary
    branches = [(11 * np.arange(length) + length) % vocabulary for length in BRANCHES]
    starts = [TRUNK, TRUNK + BRANCHES[0]]
    total = TRUNK + sum(BRANCHES)
    position = np.concatenate([np.arange(TRUNK), *(TRUNK + np.arange(length) for length in BRANCHES)])
    end = np.concatenate([np.full(TRUNK, total), np.full(BRANCHES[0], starts[1]), np.full(BRANCHES[1], total)])
    target = np.arange(1, total)
    predictor = np.where(target == starts[1], TRUNK - 1, target - 1)
    ones, none = np.ones(len(target), np.float32), np.zeros(len(target), np.int64)
    batch = TreeBatch(np.concatenate([trunk, *branches]), position, end, target, predictor, ones, none, none)
    return batch, [np.concatenate([trunk, branch]) for branch in branches]


def _plain(model, states: torch.Tensor | None, tokens: torch.Tensor, last: bool) -> tuple[torch.Tensor]:
    """Returns hidden states of a sequence; on the last stage, log-probabilities of all its tokens except the first."""
    found = model.forward_sequences(tokens, states, last)
    return (found.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].contiguous() if last else found,)


def _check_stage(learner: Learner, compute: torch.dtype) -> None:
    """Raises `StartError` if a stage changes hidden states outside its layers.

    An example is an embedding scale that a model applies there: every stage would apply it again.
    """
    model, device = learner.model, learner.ranks.device
    states = torch.linspace(-2.0, 3.0, 3 * model.config.hidden_size).view(3, -1).to(device, compute)
    try:
        same = torch.equal(model.without_layers(states), states)
    except (TypeError, ValueError, AttributeError) as odd:
        raise StartError(f"a {model.config.model_type} cannot be cut into stages: {odd}; leave out --pp") from None
    if not same:
        raise StartError(
            f"a {model.config.model_type} changes hidden states outside of its layers, which every stage would do again; "
            "leave out --pp"
        )


@torch.no_grad()
def check(learner: Learner, compute: torch.dtype) -> None:
    """Raises `StartError` on rank 0 if a log-probability differs by more than the bound."""
    model, ranks = learner.model, learner.ranks
    if ranks.pipeline.size > 1:
        _check_stage(learner, compute)
    batch, paths = tree(model.config.vocab_size)
    # If the tree were split between the ranks, no branches would be left.
    ours = learner.evaluate(batch, "logprobs", whole=True)
    theirs = []
    for path in paths:
        tokens = torch.from_numpy(path).to(ranks.device)
        then = partial(_plain, tokens=tokens, last=ranks.pipeline.last)
        _, found = learner.through_stage(None, len(path), then)
        logprobs = found[0] if ranks.pipeline.last else torch.empty(len(path) - 1, device=ranks.device)
        theirs.append(ranks.pipeline.share(logprobs, ranks.pipeline.size - 1).cpu())
    learner.pass_done()
    if ours is None:
        return
    wanted = torch.cat([theirs[0], theirs[1][TRUNK - 1 :]])
    worst = float((torch.from_numpy(ours["logprobs"]) - wanted).abs().max())
    if not worst <= BOUNDS[compute]:
        raise StartError(
            f"a {model.config.model_type} does not compute trees as transformers computes sequences: log-probabilities differ by "
            f"{worst:.3g}, and {BOUNDS[compute]} is expected at most; it cannot be trained here"
        )
