"""Steps of the PyTorch learner for benchmarks: creates training data and runs updates."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "conformance"))
from torch_group import Group, Torchrun, group_arrays, path_arrays  # noqa: E402 found through the path above

__all__ = ["IMITATION", "OPTIM", "RANKS", "ROOT", "Group", "Torchrun", "inputs", "train"]

RANKS = 2
OPTIM = {
    "learning_rate": 1e-5,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
IMITATION = {"policy": "cross_entropy", "kl": None}


def inputs(paths: list[list[int]], first: int, weight: float) -> list[dict]:
    """Creates sequences whose tokens from `first` on are targets, with the given weight each."""
    term = {"weight": weight}
    return [
        {
            "tokens": path,
            "targets": [{"index": at, "temperature": 1.0, "term": term} for at in range(first, len(path))],
        }
        for path in paths
    ]


def train(group: Group, groups: list[list[dict]], tokens: int) -> None:
    """Runs an update over groups of sequences, planned for micro-batches of at most `tokens` tokens."""
    paths = [path for of_group in groups for path in of_group]
    cut = group.call("policy", "plan", {"micro_batch_tokens": tokens}, group_arrays(groups))[0]["cut"]
    group.call("policy", "train", {"loss": IMITATION, "params": OPTIM, "cut": cut}, path_arrays(paths))
