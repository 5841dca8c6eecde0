"""Fixtures: the vectors that Levade's own code wrote (`crates/rl/examples/loss_vectors.rs`)."""

import json
from pathlib import Path

import numpy as np
import pytest

from levade_torch.batch import OPTIONAL, Terms


@pytest.fixture(scope="session")
def vectors() -> dict:
    return json.loads((Path(__file__).parent / "vectors.json").read_text())


def terms_of(terms: list[dict]) -> Terms:
    """Converts terms from Levade's JSON form to columns."""

    def column(name: str) -> np.ndarray:
        kind = {"path": np.int64, "age": np.int64, "version": np.int64, "marked": bool}.get(name, np.float32)
        return np.array([np.nan if name in OPTIONAL and t[name] is None else t[name] for t in terms], kind)

    return Terms(**{name: column(name) for name in vars(Terms.empty())})
