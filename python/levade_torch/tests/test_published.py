"""Checks which publications stay on disk: the newest, and the one before, which samplers may still read."""

import os
from pathlib import Path

import pytest

from levade_torch.files import remove_old


def publish(directory: Path, versions: list[int], keep: int) -> list[list[int]]:
    """Publishes versions one after another. Returns the versions on disk after each."""
    left = []
    for time, version in enumerate(versions):
        path = directory / f"v{version}"
        path.mkdir(exist_ok=True)
        os.utime(path, (time, time))
        remove_old(directory, keep, version)
        left.append(sorted(int(found.name[1:]) for found in directory.iterdir()))
    return left


@pytest.mark.parametrize(
    ("versions", "keep", "left"),
    [
        ([1, 2, 3], 2, [[1], [1, 2], [2, 3]]),
        ([1, 2, 3], 1, [[1], [2], [3]]),
        # Back to a checkpoint: a sampler may still read 11 while it loads 5; later no sampler does.
        ([10, 11, 5, 6, 7], 2, [[10], [10, 11], [5, 11], [5, 6], [6, 7]]),
        ([9, 10, 11, 5, 6, 7], 3, [[9], [9, 10], [9, 10, 11], [5, 10, 11], [5, 6, 11], [5, 6, 7]]),
        ([3, 11, 5, 6], 2, [[3], [3, 11], [5, 11], [5, 6]]),
        ([4, 5, 5, 4], 2, [[4], [4, 5], [4, 5], [4, 5]]),
    ],
)
def test_remove_old_prefers_abandoned_versions(tmp_path, versions, keep, left):
    assert publish(tmp_path, versions, keep) == left
