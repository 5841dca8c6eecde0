"""Checks that a checkpoint is compared with the model before anything is replaced."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from levade_torch import checkpoint
from levade_torch.errors import VerbError


def critic() -> torch.nn.Module:
    model = torch.nn.Module()
    model.config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model.embedding, model.value_head = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 1)
    return model


@pytest.mark.parametrize("file", [checkpoint.HEAD, checkpoint.WEIGHTS])
def test_checkpoint_check_rejects_other_shapes(tmp_path, file):
    model = critic()
    model.config.save_pretrained(tmp_path)
    save_file({"embedding.weight": torch.zeros(5, 8)}, tmp_path / checkpoint.WEIGHTS)
    head = {"value_head.weight": torch.zeros(1, 8), "value_head.bias": torch.zeros(1)}
    checkpoint.check(model, tmp_path, True)
    save_file(head, tmp_path / checkpoint.HEAD)
    checkpoint.check(model, tmp_path, True)
    save_file({"embedding.weight": torch.zeros(5, 7), "value_head.weight": torch.zeros(1, 9)}, tmp_path / file)
    with pytest.raises(VerbError, match="of shape") as caught:
        checkpoint.check(model, tmp_path, False)
    assert caught.value.code == "storage"
