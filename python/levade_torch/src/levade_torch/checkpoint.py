"""Saves and loads weights and optimizer state in the file layout of Levade's own engine.

Files: `model.safetensors` (f32) and `config.json` as in Hugging Face; `optimiser.{first,second}.safetensors` with the
moments under the weights' names, and `optimiser.json`; `value_head*.safetensors` of a critic; an adapter in PEFT's
layout. The engine can load these files, and so can any number of ranks here.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.distributed.sharding_utils import DtensorShardOperation

from . import lora
from .errors import VerbError
from .files import Entry, Writer, read_header, storage_error
from .mesh import Ranks
from .model import original_config
from .optimizer import Optimizer, local_shard

WEIGHTS, CONFIG, STEPS = "model.safetensors", "config.json", "optimiser.json"
MOMENTS = ("optimiser.first.safetensors", "optimiser.second.safetensors")
HEAD, HEAD_MOMENTS = "value_head.safetensors", ("value_head.first.safetensors", "value_head.second.safetensors")
# Configuration values that determine the weights.
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)


def full_tensor(part: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Gathers the full tensor from this rank's part, which is sharded like the parameter `like`. Collective."""
    if not isinstance(like, DTensor):
        return part
    sharded = DTensor.from_local(
        part.to(device), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return sharded.full_tensor()


def is_head(name: str) -> bool:
    """Returns whether the parameter belongs to a value head."""
    return name.startswith("value_head.")


def weight_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns this stage's parameters of the model, or of its adapter, by their names in files. Tied parameters occur
    once.
    """
    if hasattr(model, "levade_lora"):
        return lora.adapters(model)
    return {name: p for name, p in model.named_parameters() if not is_head(name)}


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of the value head."""
    return {name: p for name, p in model.named_parameters() if is_head(name)}


def _entries(parameters: dict, parts: dict[str, Tensor], dtype: torch.dtype, ranks: Ranks) -> list[Entry]:
    """Returns tensors of all stages. `parameters` are those of this stage, and `parts` are this rank's parts of them."""
    own = [
        (name, tuple(parameter.shape), dtype, lambda n=name, p=parameter: full_tensor(parts[n], p, ranks.device))
        for name, parameter in parameters.items()
    ]
    return ranks.pipeline.join(own, ranks.device)


def weight_entries(model: nn.Module, dtype: torch.dtype, ranks: Ranks, keep: bool) -> list[Entry]:
    """Returns the weights, or an adapter, as they are stored in files. All ranks must get each tensor in this order.

    Experts that transformers stacks are gathered immediately, on the ranks with `keep`. Other ranks get no entries for
    such models.
    """
    parameters = weight_parameters(model)
    entries = _entries(parameters, {n: local_shard(p) for n, p in parameters.items()}, dtype, ranks)
    if not hasattr(model, "levade_lora") and getattr(model, "_weight_conversions", None):
        entries = _original_entries(model, entries, dtype, keep)
    return entries


def write_weights(model: nn.Module, source: Path, writer: Writer, dtype: torch.dtype, ranks: Ranks) -> None:
    """Writes the weights, or an adapter, in `dtype`, with their configuration."""
    entries = weight_entries(model, dtype, ranks, writer.writes)
    if hasattr(model, "levade_lora"):
        writer.tensors(lora.WEIGHTS, entries)
        writer.json(lora.CONFIG, lambda: lora.config_json(model, str(source)))
        return

    def config() -> dict:
        found = original_config(source) | {"dtype": str(dtype).removeprefix("torch.")}
        found.pop("torch_dtype", None)
        return found

    writer.tensors(WEIGHTS, entries)
    writer.json(CONFIG, config)


def _original_entries(model: nn.Module, entries: list[Entry], dtype: torch.dtype, keep: bool) -> list[Entry]:
    """Returns the tensors under their names in files, if transformers stacks tensors (experts) when it loads.

    The tensors pass through the memory of the writing rank.
    """
    state: dict[str, Tensor] = {}
    for name, _, _, get in entries:
        found = get()
        if keep:
            state[name] = found.to("cpu", dtype, copy=True)
    state = revert_weight_conversion(model, state) if keep else {}
    return [(name, tuple(t.shape), dtype, lambda t=t: t) for name, t in sorted(state.items())]


def write_optimizer(optimizer: Optimizer, model: nn.Module, writer: Writer, ranks: Ranks) -> None:
    """Writes step count and moments, if there are any."""
    if not optimizer.first:
        return
    _write_moments(optimizer, weight_parameters(model), MOMENTS, writer, ranks)
    if model.has_value_head:
        _write_moments(optimizer, head_parameters(model), HEAD_MOMENTS, writer, ranks)
    writer.json(STEPS, lambda: {"schema": 1, "steps": optimizer.steps})


def _write_moments(optimizer: Optimizer, parameters: dict, names, writer: Writer, ranks: Ranks) -> None:
    for file, moments in zip(names, (optimizer.first, optimizer.second), strict=True):
        writer.tensors(file, _entries(parameters, moments, torch.float32, ranks))


def write_head(model: nn.Module, writer: Writer, ranks: Ranks) -> None:
    """Writes the value head, if there is one."""
    if model.has_value_head:
        head = head_parameters(model)
        writer.tensors(HEAD, _entries(head, {n: local_shard(p) for n, p in head.items()}, torch.float32, ranks))


def check(model: nn.Module, directory: Path, with_optimizer: bool) -> None:
    """Checks that the files in a directory fit the model. Changes nothing.

    Raises `storage` with the first difference.
    """
    if hasattr(model, "levade_lora"):
        lora.check(model, directory)
    else:
        _check_config(model, directory)
        _check_weights(model, directory)
    head = head_parameters(model)
    if head and (directory / HEAD).exists():
        _check_file(directory / HEAD, head)
    if with_optimizer and (directory / STEPS).exists():
        for file in MOMENTS:
            _check_file(directory / file, weight_parameters(model))
        for file in HEAD_MOMENTS if head and (directory / HEAD_MOMENTS[0]).exists() else ():
            _check_file(directory / file, head)


def check_source(model: nn.Module, directory: Path) -> None:
    """Checks that the model's source directory is still complete. Changes nothing.

    Tensor names are left to transformers. Raises `storage` with the first problem.
    """
    _check_config(model, directory)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise VerbError("storage", f"{directory} no longer has safetensors files")
    for file in files:
        read_header(file)
    if (head := head_parameters(model)) and (directory / HEAD).exists():
        _check_file(directory / HEAD, head)


def _check_config(model: nn.Module, directory: Path) -> None:
    try:
        found = AutoConfig.from_pretrained(directory, local_files_only=True)
    except OSError as error:
        raise storage_error(error, "read", directory / CONFIG) from None
    except (ValueError, KeyError) as error:
        raise VerbError("storage", f"{directory / CONFIG} is not a valid configuration: {error}") from None
    for key in SHAPE:
        there, here = (getattr(config, key, None) for config in (found, model.config))
        if there != here:
            raise VerbError(
                "storage", f"{directory} holds a model with {key} = {there}; the learner was started with {here}"
            )


def _check_weights(model: nn.Module, directory: Path) -> None:
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise VerbError("storage", f"{directory} has no {WEIGHTS}")
    headers = {name: shape for file in files for name, shape in read_header(file).items()}
    if getattr(model, "_weight_conversions", None):
        return
    _compare(directory, headers, weight_parameters(model))


def _check_file(path: Path, parameters: dict[str, nn.Parameter]) -> None:
    _compare(path, read_header(path), parameters)


def _compare(where: Path, header: dict[str, tuple[int, ...]], parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if header.get(name) != tuple(parameter.shape):
            raise VerbError(
                "storage", f"{where} has {name} of shape {header.get(name)}; the model has {tuple(parameter.shape)}"
            )


def read_head(model: nn.Module, directory: Path) -> None:
    """Reads the value head, if both the model and the directory have one."""
    if head_parameters(model) and (directory / HEAD).exists():
        _check_file(directory / HEAD, head_parameters(model))
        _read(directory / HEAD, {name: (p, local_shard(p)) for name, p in head_parameters(model).items()})


def read_optimizer(optimizer: Optimizer, model: nn.Module, directory: Path) -> None:
    """Reads step count and moments; every rank reads its own part. Without these files, the optimizer starts from
    zero.
    """
    if not (directory / STEPS).exists():
        return
    optimizer.ensure()
    optimizer.steps = int(json.loads((directory / STEPS).read_text())["steps"])
    for names, parameters in ((MOMENTS, weight_parameters(model)), (HEAD_MOMENTS, head_parameters(model))):
        for file, moments in zip(names, (optimizer.first, optimizer.second), strict=True):
            if parameters and (directory / file).exists():
                _read(directory / file, {name: (p, moments[name]) for name, p in parameters.items()})


@torch.no_grad()
def _read(path: Path, into: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Reads this rank's part of each tensor into the given destination. The parameters define the sharding."""
    with safe_open(path, "pt") as file:
        for name, (like, part) in into.items():
            source = file.get_slice(name)
            found = DtensorShardOperation(like).shard_tensor(source) if isinstance(like, DTensor) else source[:]
            part.copy_(found)


def save(model, optimizer: Optimizer | None, source: Path, directory: Path, ranks: Ranks) -> list[str]:
    """Writes weights in f32, the value head and, if given, the optimizer state to an existing directory. Returns file
    names.

    Raises `storage` on the writing rank, after all ranks have finished.
    """
    writer = Writer(directory if ranks.rank == 0 else None)
    write_weights(model, source, writer, torch.float32, ranks)
    write_head(model, writer, ranks)
    if optimizer:
        write_optimizer(optimizer, model, writer, ranks)
    return writer.finish()
