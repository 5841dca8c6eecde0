"""LoRA adapters in PEFT's layout. The base model is frozen and sharded. A and B are small, f32, and unsharded on every
rank of their stage.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from .errors import StartError, VerbError
from .files import read_header, storage_error
from .mesh import Ranks

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@dataclass(frozen=True)
class LoraOptions:
    """Rank, alpha and the projections that get an adapter. `seed` initializes A; B starts at 0."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    seed: int = 0

    def json(self) -> dict:
        """Returns the JSON form for `describe`."""
        return {name: value for name, value in asdict(self).items() if name != "seed"}


def inject(model: nn.Module, options: LoraOptions, ranks: Ranks) -> None:
    """Freezes the model and adds adapters to its projections. All ranks get equal bits.

    Raises `StartError` if PEFT is not installed, or if tensor or expert parallelism splits the projections.
    """
    if ranks.shape.tensor > 1 or ranks.shape.expert > 1:
        raise StartError(
            "--lora-rank together with --tp or --ep is not supported: shard adapters' bases by FSDP2 (and --cp) alone"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise StartError("--lora-rank needs PEFT: pip install 'levade-torch[lora]'") from None
    model.requires_grad_(False)
    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=list(options.targets), task_type="CAUSAL_LM"
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise StartError(f"--lora-targets {','.join(options.targets)}: {error}") from None
    model.levade_lora, model.levade_adapters = config, {}
    own = adapters(model)
    for found in ranks.pipeline.gather({name: tuple(parameter.shape) for name, parameter in own.items()}):
        model.levade_adapters |= found
    for name, value in _starts(model, options):
        own[name].data = value.to(ranks.device)
        own[name].requires_grad_(True)


def _starts(model: nn.Module, options: LoraOptions) -> Iterator[tuple[str, Tensor]]:
    """Returns the initial values of this stage's adapters, with their names.

    Values of other stages are sampled too, so that initial values do not depend on the sharding.
    """
    own, generator = adapters(model), torch.Generator().manual_seed(options.seed)
    for name, shape in model.levade_adapters.items():
        bound = 0.0 if ".lora_B." in name else shape[1] ** -0.5
        value = (2.0 * torch.rand(shape, generator=generator) - 1.0) * bound
        if name in own:
            yield name, value


@torch.no_grad()
def restart(model: nn.Module, options: LoraOptions) -> None:
    """Resets adapters to their initial values."""
    own = adapters(model)
    for name, value in _starts(model, options):
        own[name].copy_(value)


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the adapters' parameters by PEFT's names in files."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".lora_A." in name or ".lora_B." in name:
            found["base_model.model." + name.replace(".default.", ".")] = parameter
    return found


def sum_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Sums the gradients over all ranks of a stage, since FSDP2 does not manage adapters."""
    if ranks.shape.stage == 1:
        return
    parameters = list(adapters(model).values())
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(total, group=ranks.stage)
    for parameter, part in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def config_json(model: nn.Module, base: str) -> dict:
    """Returns `adapter_config.json` as PEFT writes it."""
    config = model.levade_lora.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    return json.loads(json.dumps(config, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def check(model: nn.Module, directory: Path) -> None:
    """Checks that an adapter's files fit. Changes nothing.

    Raises `storage` with the first difference.
    """
    wanted = model.levade_adapters
    if (found := read_header(directory / WEIGHTS)) != wanted:
        odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        raise VerbError(
            "storage",
            f"{directory / WEIGHTS} does not fit the adapter: {odd[0]} is {found.get(odd[0])}, not {wanted.get(odd[0])}",
        )
    try:
        text = json.loads((directory / CONFIG).read_text())
    except OSError as error:
        raise storage_error(error, "read", directory / CONFIG) from None
    for key in ("r", "lora_alpha"):
        if text.get(key) != getattr(model.levade_lora, key):
            raise VerbError(
                "storage",
                f"{directory / CONFIG} has {key} = {text.get(key)}; the adapter has {getattr(model.levade_lora, key)}",
            )


def load(model: nn.Module, directory: Path) -> None:
    """Reads an adapter that passed `check`."""
    found = load_file(directory / WEIGHTS)
    with torch.no_grad():
        for name, parameter in adapters(model).items():
            parameter.copy_(found[name])
