"""Compares merging with Levade's own code, and checks that inconsistent batches are rejected."""

import numpy as np
import pytest

from conftest import terms_of
from levade_torch.batch import TreeBatch
from levade_torch.errors import VerbError
from levade_torch.merge import Paths, merge


def paths_of(paths: list[dict]) -> Paths:
    targets = [target for path in paths for target in path["targets"]]
    counts = [len(path["targets"]) for path in paths]
    terms = terms_of([t["term"] for t in targets])
    terms.path = np.repeat(np.arange(len(paths)), counts)
    return Paths(
        [np.array(path["tokens"], np.int64) for path in paths],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([t["index"] for t in targets], np.int64),
        np.array([t["temperature"] for t in targets], np.float32),
        terms,
    )


def test_merge_matches_levade_batches(vectors):
    for case in vectors["merged"]:
        found = merge(paths_of(case["paths"]), list(range(len(case["paths"]))))
        wanted = case["merged"]
        assert found.tokens.tolist() == wanted["tokens"]
        names = {"target_token": "token", "predictor": "predictor", "first_term": "first_term", "term_count": "terms"}
        for ours, theirs in names.items():
            assert getattr(found, ours).tolist() == [t[theirs] for t in wanted["targets"]], ours
        temperatures = np.array([t["temperature"] for t in wanted["targets"]], np.float32)
        assert (found.temperature == temperatures).all()
        terms = terms_of(wanted["terms"])
        for name, column in vars(terms).items():
            np.testing.assert_array_equal(getattr(found.terms, name), column, err_msg=name)
        position, ends = [], [0] * len(wanted["nodes"])
        for at, node in reversed(list(enumerate(wanted["nodes"]))):
            ends[at] = max(
                [node["start"] + node["len"], *(ends[c] for c, n in enumerate(wanted["nodes"]) if n["parent"] == at)]
            )
        for node in wanted["nodes"]:
            position += range(node["depth"], node["depth"] + node["len"])
        assert found.position.tolist() == position
        assert found.subtree_end.tolist() == [ends[at] for at, n in enumerate(wanted["nodes"]) for _ in range(n["len"])]
        found.check()


def golden() -> TreeBatch:
    return TreeBatch(
        np.arange(1, 11),
        np.array([0, 1, 2, 3, 4, 3, 4, 5, 2, 3]),
        np.array([10, 10, 8, 5, 5, 8, 8, 8, 10, 10]),
        np.array([2, 9]),
        np.array([1, 8]),
        np.ones(2, np.float32),
        np.array([0, 1]),
        np.array([1, 1]),
        terms_of(
            [
                {
                    "path": 0,
                    "weight": 1.0,
                    "advantage": 1.0,
                    "returns": 0.0,
                    "value": None,
                    "behaviour": None,
                    "proximal": None,
                    "reference": None,
                    "path_log_ratio": None,
                    "correction": None,
                    "marked": False,
                    "age": 0,
                    "version": 0,
                }
            ]
            * 2
        ),
    )


def test_batch_check_rejects_inconsistent_arrays():
    golden().check()
    for field, at, value, message in [
        ("subtree_end", 3, 9, "subtree_end.3. is 9; it must be 4 to 8"),
        ("subtree_end", 0, 11, "subtree_end.0. is 11"),
        ("position", 5, 5, "position.5. is 5, but the path has 3"),
        ("predictor", 1, 7, "target 1 is token 9, which 7 does not precede"),
        ("target_token", 0, 10, "target 0 is token 10 of 10"),
        ("target_token", 0, 0, "which 1 does not precede"),
        ("temperature", 1, 0.0, "temperature 0.0"),
        ("term_count", 1, 2, "2 terms from 1, but there are 2"),
        ("term_count", 1, 0, "0 terms"),
    ]:
        batch = golden()
        getattr(batch, field)[at] = value
        with pytest.raises(VerbError, match=message):
            batch.check()
    with pytest.raises(VerbError, match="token 9 has the id 10"):
        golden().check_fits(10, 99)
    with pytest.raises(VerbError, match="6 tokens, but the context holds 5"):
        golden().check_fits(99, 5)


def test_take_keeps_targets_of_complete_trees():
    batch = merge(
        Paths(
            [np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([5, 6])],
            np.array([0, 2, 3, 4]),
            np.array([1, 2, 2, 1]),
            np.ones(4, np.float32),
            golden().terms[[0, 0, 0, 1]],
        ),
        [0, 1, 2],
    )
    assert batch.branches().tolist() == [0, 2, 3, 4, 6]
    part, indices = batch.take(4, 6)
    assert part.tokens.tolist() == [5, 6] and part.subtree_end.tolist() == [2, 2] and indices.tolist() == [3]
    assert (part.target_token.tolist(), part.predictor.tolist(), part.term_index.tolist()) == ([1], [0], [3])
    first, indices = batch.take(0, 4)
    assert first.target_token.tolist() == [1, 2, 3] and indices.tolist() == [0, 1, 2]
