"""Checks that learners return to the state in which their group was started, with equal bits, also after a step."""

import pytest

from levade_torch.errors import VerbError
from ranks import IMITATION, VALUES, Rank, batch_arrays, merged, run

PATHS = [[1, 2, 3, 4, 5], [1, 2, 9, 8], [7, 7, 3], [5, 6, 7, 8]]


def first_steps(rank: Rank, name: str, number: int) -> list:
    """Returns the files of a learner, before and after a step."""
    results = [rank.host.describe()["learners"][name], rank.save(f"{name}-{number}", name), rank.publish(1, name)]
    if results[0]["trains"]:
        results += [rank.train(PATHS, name), rank.save(f"{name}-{number}-trained", name)]
    return results


def goes_back(rank: Rank, names: tuple[str, ...]) -> None:
    for name in names:
        first = first_steps(rank, name, 0)
        if name == "reference":
            rank.ask("load", {"folder": str(rank.root / "policy-0-trained"), "with_optimiser": False}, of=name)
            assert rank.publish(2, name) != first[2]
        else:
            assert first[1] != first[4] and "optimiser.json" in first[4] and "optimiser.json" not in first[1]
            loss = VALUES if name == "critic" else IMITATION
            rank.ask("forward_backward", {"loss": loss}, batch_arrays(merged(PATHS)), of=name)
        rank.ask("load", {"folder": None}, of=name)
        assert first_steps(rank, name, 1) == first
    assert rank.host.describe()["learners"]["policy"]["version"] == 1


@pytest.mark.parametrize(
    ("world", "options", "names"),
    [
        (1, {}, ("policy",)),
        (2, {"critic": "model", "reference": "model"}, ("policy", "critic", "reference")),
        (2, {"tp": 2}, ("policy",)),
        (2, {"pp": 2}, ("policy",)),
        (2, {"lora_rank": 2}, ("policy",)),
    ],
)
def test_load_null_restores_initial_state(tmp_path, world, options, names):
    if "lora_rank" in options:
        pytest.importorskip("peft")
    options = {name: tmp_path / value if value == "model" else value for name, value in options.items()}
    run(world, goes_back, tmp_path, names, **options)


def has_lost_it(rank: Rank) -> tuple[str, dict | None]:
    rank.train(PATHS)
    rank.group.agree(None)
    if not rank.group.rank:
        (rank.host.sources["policy"] / "model.safetensors").write_bytes(b"short")
    rank.group.agree(None)
    with pytest.raises(VerbError) as caught:
        rank.ask("load", {"folder": None})
    assert caught.value.code == "storage"
    with pytest.raises(VerbError, match="'folder'"):
        rank.ask("load", {"with_optimiser": True})
    return caught.value.message, rank.train(PATHS)


def test_load_null_with_missing_source_changes_nothing(tmp_path):
    (message, results), _ = run(2, has_lost_it, tmp_path, collective_seconds=60)
    assert "model/model.safetensors" in message and results["step"]["applied"]
