"""Checks that all ranks get an error at once if a checkpoint or publication cannot be written, and continue."""

import time

import pytest

from levade_torch.errors import VerbError
from ranks import Rank, run

PATHS = [[1, 2, 3, 4, 5], [1, 2, 9, 8], [7, 7, 3], [5, 6, 7, 8]]
# SOON is far below WAIT, the ranks' timeout for each other. A rank that leaves early would cost WAIT.
SOON, WAIT = 5.0, 20.0


def refused(rank: Rank, verb: str, control: dict) -> str:
    """Returns the reason for which a verb is rejected, which must arrive soon."""
    started = time.monotonic()
    with pytest.raises(VerbError) as caught:
        rank.ask(verb, control)
    assert time.monotonic() - started < SOON
    assert (caught.value.code, caught.value.status) == ("storage", 422)
    return caught.value.message


def saves_in_the_way(rank: Rank, obstacle: str, full: bool) -> list:
    rank.train(PATHS)
    directory = rank.root / "refused"
    if not rank.group.rank:
        directory.mkdir()
        if full:
            (directory / obstacle).symlink_to("/dev/full")
        else:
            # Root can write everywhere, but not over a directory.
            (directory / obstacle).mkdir()
    rank.group.agree(None)
    message = refused(rank, "save", {"folder": str(directory), "with_optimiser": True})
    left = sorted(path.name for path in directory.iterdir() if path.is_file())
    return [message, left, rank.save("elsewhere"), rank.train(PATHS)]


@pytest.mark.parametrize(
    ("obstacle", "full"),
    [
        (".model.safetensors.part", False),
        ("config.json", False),
        (".optimiser.first.safetensors.part", True),
        ("optimiser.json", False),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_failed_save_is_reported_at_once_and_group_continues(tmp_path, world, obstacle, full):
    found = run(world, saves_in_the_way, tmp_path, obstacle, full, collective_seconds=WAIT)
    name = obstacle.removeprefix(".").removesuffix(".part") if full else obstacle
    why = "No space left on device" if full else "Is a directory"
    for message, left, saved, _ in found:
        assert message == f"cannot write {tmp_path / 'run' / 'refused' / name}: {why}"
        # Nothing is written after the first failure, and no partial file stays.
        assert all(not name.endswith(".part") for name in left) and "optimiser.json" not in left
        assert len(saved) == 6
    assert found[0][3]["step"]["applied"]


def publishes_in_the_way(rank: Rank) -> list:
    parent = rank.root / "published"
    if not rank.group.rank:
        parent.write_text("a file where a folder should be")
    rank.group.agree(None)
    message = refused(rank, "publish", {"version": 1})
    before = rank.host.describe()["learners"]["policy"]["version"]
    rank.group.agree(None)
    if not rank.group.rank:
        parent.unlink()
    rank.group.agree(None)
    return [message, before, sorted(rank.publish(2))]


@pytest.mark.parametrize("world", [1, 2])
def test_failed_publish_is_reported_and_next_succeeds(tmp_path, world):
    found = run(world, publishes_in_the_way, tmp_path, collective_seconds=WAIT)
    # Only rank 0 knows and reports what was published.
    assert found[0][1] is None
    for message, _, names in found:
        assert "published" in message and "Not a directory" in message
        assert names == ["config.json", "generation_config.json", "model.safetensors"]


def loses_its_source(rank: Rank) -> list:
    rank.group.agree(None)
    if not rank.group.rank:
        (rank.host.sources["policy"] / "config.json").rename(rank.root / "config.json")
    rank.group.agree(None)
    return [refused(rank, "publish", {"version": 1}), rank.train(PATHS)]


@pytest.mark.parametrize("world", [1, 2])
def test_missing_source_is_reported(tmp_path, world):
    for message, _ in run(world, loses_its_source, tmp_path, collective_seconds=WAIT):
        assert "cannot read" in message and "config.json" in message
