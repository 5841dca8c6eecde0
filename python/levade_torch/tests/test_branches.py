"""Checks that batches split between branches give every rank work, and the same results as the full batch."""

import numpy as np
import pytest
import torch

from levade_torch import probe
from levade_torch.batch import TreeBatch
from levade_torch.micro_batches import distribute_runs
from ranks import IMITATION, VOCABULARY, Rank, batch_arrays, merged, run

TRUNK, LENGTH, BRANCHES = 9, 7, 6


def forest(random: np.random.Generator) -> TreeBatch:
    """Creates sequences that start with a prefix of earlier ones, or without a common prefix."""
    paths: list[list[int]] = []
    for _ in range(random.integers(1, 12)):
        earlier = paths[random.integers(len(paths))] if paths and random.random() < 0.7 else []
        shared = earlier[: random.integers(0, 20)]
        paths.append([*shared, *random.integers(0, 4, random.integers(2, 30)).tolist()])
    return merged(paths)


def chains(batch: TreeBatch) -> list[list[int]]:
    """Returns the tokens that every token sees, as packed indices."""
    return [np.flatnonzero(batch.subtree_end[: k + 1] > k).tolist() for k in range(len(batch.tokens))]


@pytest.mark.parametrize("seed", range(60))
def test_branch_runs_preserve_ancestors_and_targets(seed):
    random = np.random.default_rng(seed)
    batch = forest(random)
    ancestors, bounds = chains(batch), batch.branches()
    max_tokens, world = int(random.integers(1, 80)), int(random.integers(1, 5))
    rounds = distribute_runs(bounds, batch.position[bounds[:-1]], max_tokens, world)
    runs = [run for one in rounds for run in one]
    assert [len(one) for one in rounds[:-1]] == [world] * (len(rounds) - 1)
    assert [start for start, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == len(batch.tokens)
    targets = []
    for start, end in runs:
        part, indices = batch.take(start, end)
        part.check()
        assert len(part.tokens) <= max(max_tokens, batch.position[start:end].max() + 1)
        for token, before, index in zip(part.target_token, part.predictor, indices, strict=True):
            # Compares the ancestors of a target, token for token, up to the target.
            there = ancestors[batch.target_token[index]]
            here = np.flatnonzero(part.subtree_end[: token + 1] > token)
            assert part.tokens[here].tolist() == batch.tokens[there].tolist()
            assert part.position[here].tolist() == list(range(len(here)))
            assert here[-1] == token and here[-2] == before
        same = ("temperature", "first_term", "term_count")
        assert all(np.array_equal(getattr(part, name), getattr(batch, name)[indices]) for name in same)
        targets += indices.tolist()
    assert sorted(targets) == list(range(len(batch.target_token)))


def chat(seed: int) -> TreeBatch:
    """Creates several completions of one prompt."""
    random = np.random.default_rng(seed)
    draw = lambda count: random.integers(0, VOCABULARY, count).tolist()  # noqa: E731
    trunk = draw(TRUNK)
    return merged([[*trunk, first, *draw(LENGTH - 1)] for first in range(BRANCHES)])


def watched(rank: Rank) -> list[int]:
    """Returns a list to which the sizes of this rank's computations are added."""
    sizes: list[int] = []
    for learner in rank.host.learners.values():

        def layout(part, original=learner._layout):
            found = original(part)
            sizes.append(len(found[0].tokens))
            return found

        learner._layout = layout
    return sizes


def evaluates(rank: Rank) -> list:
    """Returns the sizes of this rank's computations, and the results."""
    sizes = watched(rank)
    arrays = batch_arrays(chat(3))
    found = [rank.ask("predictions", {}, arrays), rank.ask("values", {}, arrays, of="critic")]
    evaluated = list(sizes)
    sums = rank.ask("forward_backward", {"loss": IMITATION}, arrays)
    params = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.0}
    step = rank.ask("optim_step", {"params": params | {"max_grad_norm": None}})
    return [evaluated, found, sums and sums[0]["sums"], step and step[0]["step"]]


def test_ranks_split_completions_within_token_limit(tmp_path):
    options = {"critic": tmp_path / "model"}
    ((_, ancestors, sums, step),) = run(1, evaluates, tmp_path, tokens=1000, **options)
    found = run(2, evaluates, tmp_path, tokens=1000, **options)
    # Two passes, with half of the completions on each rank.
    assert [one[0] for one in found] == [[TRUNK + LENGTH * BRANCHES // 2] * 2] * 2
    tight = run(2, evaluates, tmp_path, tokens=TRUNK + LENGTH, **options)
    assert all(max(one[0]) <= TRUNK + LENGTH and len(one[0]) == BRANCHES for one in tight)
    for _, results, other_sums, other_step in (found[0], tight[0]):
        for (_, ours), (_, theirs) in zip(results, ancestors, strict=True):
            assert ours.keys() == theirs.keys()
            for name, column in theirs.items():
                np.testing.assert_allclose(ours[name], column, atol=1e-5)
        assert other_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
        assert other_sums["loss"] == pytest.approx(sums["loss"], rel=1e-5)


def probes(rank: Rank) -> list[int]:
    sizes = watched(rank)
    probe.check(rank.host.learners["policy"], torch.float32)
    return sizes


def test_startup_probe_is_never_split_between_ranks(tmp_path):
    assert run(2, probes, tmp_path, tokens=4) == [[len(probe.tree(VOCABULARY)[0].tokens)], [1]]
