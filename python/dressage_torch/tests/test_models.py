"""What a group starts with, and what it tells of itself."""

import pytest

from ranks import Rank, run


def describes(rank: Rank) -> dict:
    return rank.host.describe()


def test_a_group_tells_the_types_that_it_computes_and_publishes_in_and_its_adapter(tmp_path):
    pytest.importorskip("peft")
    adapter = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": "q_proj,v_proj"}
    (told,) = run(1, describes, tmp_path, export_dtype="bf16", reference=tmp_path / "model", **adapter)
    assert (told["dtype"], told["export_dtype"]) == ("f32", "bf16")
    assert told["learners"]["policy"]["lora"] == {"rank": 2, "alpha": 6.0, "targets": ("q_proj", "v_proj")}
    assert told["learners"]["reference"]["lora"] is None
