"""Checks micro-batch plans: filling, distribution to ranks, and named differences."""

import numpy as np
import pytest

from levade_torch.cut import Cut, MicroBatch, deal, filled, merged, plan
from levade_torch.errors import VerbError


def group(first: int) -> list[np.ndarray]:
    return [np.array(tokens) for tokens in ([first, 1, 2], [first, 1, 3], [first, 4])]


def test_groups_stay_together_if_they_fit():
    """The cases of `Cut::filled`. After merging, a group has 5 tokens."""
    groups = [group(10), [], group(20)]
    assert merged(group(10)) == 5 and merged([]) == 0
    assert filled(groups, 10) == [[0, 1, 2, 3, 4, 5]]
    assert filled(groups, 9) == [[0, 1, 2], [3, 4, 5]]
    assert filled(groups, 4) == [[0, 1], [2], [3, 4], [5]]
    assert filled(groups, 1) == [[0], [1], [2], [3], [4], [5]]
    assert filled([], 9) == []


def test_plan_balances_ranks_and_fills_rounds():
    groups = [group(10), group(20), group(30)]
    cut = plan(groups, 100, 2)
    assert [(b.rank, b.paths) for b in cut.micro_batches] == [(0, (0, 1, 2)), (1, (3, 4, 5)), (0, (6, 7, 8)), (1, ())]
    cut.check(9, 2)
    assert cut.rounds() == [{0: 0, 1: 1}, {0: 2, 1: 3}]
    assert plan(groups, 100, 2) == cut
    assert plan(groups, 100, 1).micro_batches == (MicroBatch(0, tuple(range(9))),)
    # Larger micro-batches come first, so that the ranks of a round finish at about the same time.
    sizes = plan([[np.arange(n) + 10 * n] for n in (3, 9, 4, 8)], 9, 2)
    assert [b.paths for b in sizes.micro_batches] == [(1,), (3,), (2,), (0,)]


def test_plan_check_names_first_difference():
    complete = Cut(1, (MicroBatch(0, (1, 0)), MicroBatch(0, ()), MicroBatch(0, (2,))))
    complete.check(3, 1)
    assert Cut.parse(complete.json()) == complete
    for cut, paths, ranks, message in [
        (complete, 3, 4, "made for 1 ranks, and there are 4"),
        (complete, 4, 1, "path 3 is in no micro-batch"),
        (complete, 2, 1, "micro-batch 2 has path 2, but there are 2"),
        (Cut(1, (MicroBatch(0, (0,)), MicroBatch(0, (1, 0)))), 2, 1, "micro-batch 1 has path 0, which came before"),
        (Cut(2, (MicroBatch(2, (0,)),)), 1, 2, "micro-batch 0 is for rank 2 of 2"),
    ]:
        with pytest.raises(VerbError, match=message) as caught:
            cut.check(paths, ranks)
        assert caught.value.code == "cut" and caught.value.status == 409


def test_branches_stay_complete_in_fewest_rounds():
    no_ancestors = np.zeros(3, np.int64)
    bounds = np.array([0, 5, 9, 12])
    assert deal(bounds, no_ancestors, 100, 1) == [[(0, 12)]]
    assert deal(bounds, no_ancestors, 100, 2) == [[(0, 5), (5, 12)]]
    assert deal(bounds, no_ancestors, 100, 8) == [[(0, 5), (5, 9), (9, 12)]]
    assert deal(bounds, no_ancestors, 9, 1) == [[(0, 5)], [(5, 12)]]
    assert deal(np.array([0, 50]), np.array([0]), 9, 4) == [[(0, 50)]]
    assert deal(np.array([0]), np.zeros(0, np.int64), 9, 4) == []
    # Three branches follow five tokens. Each run contains these five, which are no run by themselves.
    tree = np.array([0, 5, 9, 13, 17]), np.array([0, 5, 5, 5])
    assert deal(*tree, 100, 1) == [[(0, 17)]]
    assert deal(*tree, 100, 4) == [[(0, 9), (9, 13), (13, 17)]]
    assert deal(*tree, 100, 2) == [[(0, 13), (13, 17)]]
    assert deal(*tree, 13, 1) == [[(0, 13)], [(13, 17)]]
    assert deal(*tree, 9, 2) == [[(0, 9), (9, 13)], [(13, 17)]]
    assert deal(*tree, 3, 1) == [[(0, 5)], [(5, 9)], [(9, 13)], [(13, 17)]]
