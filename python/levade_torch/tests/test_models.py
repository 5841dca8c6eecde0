"""Checks which models a group accepts, and what it reports in `describe`."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3Config, Gemma3TextConfig

from levade_torch.errors import StartError
from levade_torch.model import check_config
from ranks import Rank, run


def test_multimodal_model_is_rejected_and_text_model_accepted(tmp_path):
    text = Gemma3TextConfig(hidden_size=8, num_hidden_layers=2)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    Gemma3Config(text_config=text).save_pretrained(tmp_path)
    with pytest.raises(StartError) as caught:
        check_config(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} is a gemma3 with more than text; the learner trains its text model alone: give a folder of that"
    )
    text.save_pretrained(tmp_path)
    assert check_config(tmp_path).model_type == "gemma3_text"


def describes(rank: Rank) -> dict:
    return rank.host.describe()


def test_describe_reports_dtypes_and_adapter(tmp_path):
    pytest.importorskip("peft")
    adapter = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": "q_proj,v_proj"}
    (description,) = run(1, describes, tmp_path, export_dtype="bf16", reference=tmp_path / "model", **adapter)
    assert (description["dtype"], description["export_dtype"]) == ("f32", "bf16")
    assert description["learners"]["policy"]["lora"] == {"rank": 2, "alpha": 6.0, "targets": ("q_proj", "v_proj")}
    assert description["learners"]["reference"]["lora"] is None
