"""Checks which models can be split over how many ranks."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from levade_torch.errors import StartError
from levade_torch.mesh import Shape
from levade_torch.model import _check_shares
from levade_torch.options import parse

DENSE = SimpleNamespace(model_type="llama", num_attention_heads=8, num_key_value_heads=4)
MIXED = SimpleNamespace(model_type="qwen3_moe", num_attention_heads=8, num_key_value_heads=4, num_experts=6)


@pytest.mark.parametrize(
    ("config", "tensor", "expert", "why"),
    [
        (DENSE, 4, 1, None),
        (MIXED, 2, 6, None),
        (DENSE, 8, 1, "--tp 8 does not divide the 4 heads of keys and values"),
        (DENSE, 3, 1, "--tp 3 does not divide the 8 heads"),
        (DENSE, 1, 2, "is a llama without experts; leave out --ep"),
        (MIXED, 1, 4, "--ep 4 does not divide the 6 experts"),
    ],
)
def test_uneven_split_is_rejected_with_flag_name(config, tensor, expert, why):
    shape = Shape(world=24, tensor=tensor, context=1, expert=expert)
    if why is None:
        return _check_shares(config, Path("m"), shape)
    with pytest.raises(StartError) as error:
        _check_shares(config, Path("m"), shape)
    assert why in str(error.value)


def test_abbreviated_flag_is_rejected(capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--run-root", "r", "--export", "f32"])
    assert "unrecognized arguments: --export f32" in capsys.readouterr().err
