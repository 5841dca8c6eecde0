"""Checks micro-batch plans: filling, distribution to ranks, and named differences."""

import numpy as np
import pytest

from levade_torch.errors import VerbError
from levade_torch.micro_batches import (
    MicroBatch,
    MicroBatchPlan,
    count_merged_tokens,
    distribute_runs,
    fill_micro_batches,
    plan,
)


def group(first: int) -> list[np.ndarray]:
    return [np.array(tokens) for tokens in ([first, 1, 2], [first, 1, 3], [first, 4])]


def test_groups_stay_together_if_they_fit():
    """The cases of `Cut::filled`. After merging, a group has 5 tokens."""
    groups = [group(10), [], group(20)]
    assert count_merged_tokens(group(10)) == 5 and count_merged_tokens([]) == 0
    assert fill_micro_batches(groups, 10) == [[0, 1, 2, 3, 4, 5]]
    assert fill_micro_batches(groups, 9) == [[0, 1, 2], [3, 4, 5]]
    assert fill_micro_batches(groups, 4) == [[0, 1], [2], [3, 4], [5]]
    assert fill_micro_batches(groups, 1) == [[0], [1], [2], [3], [4], [5]]
    assert fill_micro_batches([], 9) == []


def test_plan_balances_ranks_and_fills_rounds():
    groups = [group(10), group(20), group(30)]
    batch_plan = plan(groups, 100, 2)
    assert [(b.rank, b.paths) for b in batch_plan.micro_batches] == [
        (0, (0, 1, 2)),
        (1, (3, 4, 5)),
        (0, (6, 7, 8)),
        (1, ()),
    ]
    batch_plan.check(9, 2)
    assert batch_plan.rounds() == [{0: 0, 1: 1}, {0: 2, 1: 3}]
    assert plan(groups, 100, 2) == batch_plan
    assert plan(groups, 100, 1).micro_batches == (MicroBatch(0, tuple(range(9))),)
    # Larger micro-batches come first, so that the ranks of a round finish at about the same time.
    sizes = plan([[np.arange(n) + 10 * n] for n in (3, 9, 4, 8)], 9, 2)
    assert [b.paths for b in sizes.micro_batches] == [(1,), (3,), (2,), (0,)]


def test_plan_check_names_first_difference():
    complete = MicroBatchPlan(1, (MicroBatch(0, (1, 0)), MicroBatch(0, ()), MicroBatch(0, (2,))))
    complete.check(3, 1)
    assert MicroBatchPlan.parse(complete.json()) == complete
    for batch_plan, paths, ranks, message in [
        (complete, 3, 4, "is for 1 ranks, but the group has 4"),
        (complete, 4, 1, "path 3 is missing from the micro-batch plan"),
        (complete, 2, 1, "micro-batch 2 of the plan has path 2, but the update has 2"),
        (
            MicroBatchPlan(1, (MicroBatch(0, (0,)), MicroBatch(0, (1, 0)))),
            2,
            1,
            "micro-batch 1 of the plan repeats path 0",
        ),
        (MicroBatchPlan(2, (MicroBatch(2, (0,)),)), 1, 2, "micro-batch 0 of the plan is for rank 2"),
    ]:
        with pytest.raises(VerbError, match=message) as caught:
            batch_plan.check(paths, ranks)
        assert caught.value.code == "cut" and caught.value.status == 409


def test_branches_stay_complete_in_fewest_rounds():
    no_ancestors = np.zeros(3, np.int64)
    bounds = np.array([0, 5, 9, 12])
    assert distribute_runs(bounds, no_ancestors, 100, 1) == [[(0, 12)]]
    assert distribute_runs(bounds, no_ancestors, 100, 2) == [[(0, 5), (5, 12)]]
    assert distribute_runs(bounds, no_ancestors, 100, 8) == [[(0, 5), (5, 9), (9, 12)]]
    assert distribute_runs(bounds, no_ancestors, 9, 1) == [[(0, 5)], [(5, 12)]]
    assert distribute_runs(np.array([0, 50]), np.array([0]), 9, 4) == [[(0, 50)]]
    assert distribute_runs(np.array([0]), np.zeros(0, np.int64), 9, 4) == []
    # Three branches follow five tokens. Each run contains these five, which are no run by themselves.
    tree = np.array([0, 5, 9, 13, 17]), np.array([0, 5, 5, 5])
    assert distribute_runs(*tree, 100, 1) == [[(0, 17)]]
    assert distribute_runs(*tree, 100, 4) == [[(0, 9), (9, 13), (13, 17)]]
    assert distribute_runs(*tree, 100, 2) == [[(0, 13), (13, 17)]]
    assert distribute_runs(*tree, 13, 1) == [[(0, 13)], [(13, 17)]]
    assert distribute_runs(*tree, 9, 2) == [[(0, 9), (9, 13)], [(13, 17)]]
    assert distribute_runs(*tree, 3, 1) == [[(0, 5)], [(5, 9)], [(9, 13)], [(13, 17)]]
