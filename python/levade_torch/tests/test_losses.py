"""Compares every loss with Levade's own formulas, at random terms that include extreme values."""

import copy

import numpy as np
import pytest
import torch

from conftest import terms_of
from levade_torch.batch import Terms
from levade_torch.errors import VerbError
from levade_torch.losses import POLICIES, Loss
from levade_torch.sums import Sums

NUMBERS = ("loss", "slope", "ratio", "log_ratio", "clipped", "dual", "dropped", "kl")


def test_losses_match_levade_vectors(vectors):
    terms = terms_of([point["term"] for point in vectors["points"]])
    at = torch.tensor([point["at"] for point in vectors["points"]], dtype=torch.float32)
    names = set()
    for case in vectors["losses"]:
        loss = Loss.parse(case["loss"])
        names.add(loss.policy)
        found = loss.evaluate(at, terms)
        for column, name in enumerate(NUMBERS):
            wanted = np.array([row[column] for row in case["evaluated"]], np.float64)
            ours = getattr(found, name).double().numpy()
            np.testing.assert_allclose(ours, wanted, rtol=1e-12, atol=1e-12, err_msg=f"{case['loss']}: {name}")
    assert names == set(POLICIES)


def test_loss_rejects_invalid_numbers_and_names():
    clip = {"policy": {"clip": {"low": 0.2, "high": 0.2}}}
    assert Loss.parse(clip).options == {"low": 0.2, "high": 0.2}
    for wrong, message in [
        ({"policy": "ppo"}, "unknown loss"),
        ({"policy": {"clip": {"low": 0.2}}}, "requires high"),
        ({"policy": {"clip": {"low": 0.2, "high": 0.2, "lo": 1}}}, "does not have the option lo"),
        (clip | {"kl": {"estimator": "k9", "coefficient": 0.1}}, "k9"),
        (clip | {"beta": 1}, "unknown keys beta"),
        ({"policy": {"value": {"clip": None}}, "entropy": 0.1}, "entropy"),
        ("clip", "not an object"),
    ]:
        with pytest.raises(VerbError, match=message):
            Loss.parse(wrong)


def test_loss_check_rejects_invalid_nested_options():
    clip = {"low": 0.2, "high": 0.2}
    bound = {"clamp": {"low": 0.5, "high": 2.0}}
    fine = {"policy": {"clip": clip | {"keep": {"below": 0.5, "above": 0.5}, "trust": {}}}}
    for loss in (
        fine,
        {"policy": {"value": {}}},
        {"policy": {"clip": clip}, "interpolated": {"by": "linear", "bound": bound}},
    ):
        Loss.parse(loss).check(Terms.empty())
    for wrong in (
        {"policy": {"clip": clip | {"keep": {"below": 0.5}}}},
        {"policy": {"clip": clip | {"low": "x"}}},
        {"policy": {"clip": clip | {"trust": {"cap": "x"}}}},
        {"policy": {"value": {"clip": "x"}}},
        {"policy": "reinforce", "kl": {"estimator": "k3"}},
        {"policy": "reinforce", "interpolated": {"by": "linear", "bound": {}}},
    ):
        with pytest.raises(VerbError, match="option of the loss"):
            Loss.parse(wrong).check(Terms.empty())


def test_loss_check_names_incomplete_term(vectors):
    full = vectors["points"][0]["term"] | {"behaviour": -1.0, "reference": -1.0, "path_log_ratio": 0.0, "path": 7}
    clip, kl = {"clip": {"low": 0.2, "high": 0.2}}, {"estimator": "k3", "coefficient": 0.1}
    Loss.parse({"policy": clip, "kl": kl}).check(terms_of([full]))
    for loss, lacking, message in [
        ({"policy": clip}, {"behaviour": None, "proximal": None}, "path 7. lacks a behaviour"),
        ({"policy": clip, "kl": kl}, {"reference": None}, "a reference"),
        ({"policy": {"gspo": {"low": 0.2, "high": 0.2}}}, {"path_log_ratio": None}, "log-ratio of its path"),
        ({"policy": {"value": {"clip": 0.2}}}, {"value": None}, "the value before"),
        ({"policy": "reinforce"}, {"weight": float("inf")}, "a finite weight"),
    ]:
        with pytest.raises(VerbError, match=message):
            Loss.parse(loss).check(terms_of([full, full | lacking]))


def test_sums_match_levade_counts(vectors):
    base = vectors["points"][0]["term"] | {"proximal": None, "reference": None, "correction": None, "advantage": 1.0}
    at = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    terms = [
        copy.copy(base) | {"behaviour": b, "age": a, "weight": w}
        for b, a, w in [(-1.0, 0, 0.5), (-1.5, 0, 0.25), (-1.5, 1, 0.25), (-2.5, 0, 0.0)]
    ]
    terms = terms_of(terms)
    sums = Sums()
    sums.add_terms(terms, at, torch.full((4,), 2.0), Loss.parse({"policy": "importance_sampling"}).evaluate(at, terms))
    # Mismatched bits count at age 0 with any weight; all other counts include only terms with a weight.
    assert (sums.mismatched, sums.max_mismatch, sums.terms, sums.behaviour_terms) == (2, 0.5, 3, 3)
    ratio = float(np.exp(0.5))
    assert sums.loss == pytest.approx(-(0.5 + 0.5 * ratio)) and sums.ratio == pytest.approx(1 + 2 * ratio)
    assert (sums.nll, sums.entropy, sums.drift) == (3.0, 6.0, -1.0)
