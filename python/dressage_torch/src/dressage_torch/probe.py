"""A check at the start that trees mean here what sequences mean to transformers: two branches of a small tree, each held against
the model's own forward pass.

It finds what would train silently wrong: layers that see tokens by other ways than attention, logits that are scaled or capped
after the head, an attention kernel that is off.
"""

import numpy as np
import torch

from .batch import TreeBatch
from .errors import StartError
from .learner import Learner

# Largest difference of a log-probability.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.5}
TRUNK, BRANCHES = 9, (8, 9)


def tree(vocabulary: int) -> tuple[TreeBatch, list[np.ndarray]]:
    """A trunk with two branches, all of whose tokens but the first are targets; and its two paths."""
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


@torch.no_grad()
def check(learner: Learner, compute: torch.dtype) -> None:
    """Raises `StartError` on rank 0 where a log-probability differs by more than the bound."""
    model, device = learner.model, learner.ranks.device
    batch, paths = tree(model.config.vocab_size)
    ours = learner.evaluate(batch, "logprobs")
    theirs = []
    for path in paths:
        tokens = torch.from_numpy(path).to(device)
        (logits,) = model(None, lambda model, _, tokens=tokens: (model.plain_logits(tokens),))
        theirs.append(logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].cpu())
    model.reshard()
    if ours is None:
        return
    wanted = torch.cat([theirs[0], theirs[1][TRUNK - 1 :]])
    worst = float((torch.from_numpy(ours["logprobs"]) - wanted).abs().max())
    if not worst <= BOUNDS[compute]:
        raise StartError(
            f"a {model.config.model_type} does not compute trees as transformers computes sequences: log-probabilities differ by "
            f"{worst:.3g}, and {BOUNDS[compute]} is expected at most; it cannot be trained here"
        )
