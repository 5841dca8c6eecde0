"""A Hugging Face causal language model that computes trees, sharded over the group.

transformers reads every rank's shard of the safetensors files, and applies its own plans for tensor and expert
parallelism. Pipeline stages and FSDP2 (sharding.py) are applied in between.
"""

import copy
import json
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer, apply_pipeline_parallelism

from .attention import NAME
from .errors import StartError, VerbError
from .files import storage_error
from .layout import Layout
from .mesh import Ranks, Shape, limit_waits
from .optimizer import local_shard
from .sharding import Precision, shard

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LAYERS = {"full_attention", "sliding_attention"}
# Whether transformers can combine --tp, --ep and --pp with FSDP2. It can from 5.24 on, whose configuration has
# `ep_size`.
COMBINES_SPLITS = any(field.name == "ep_size" for field in fields(DistributedConfig))


class TreeModel:
    """Mixin for a transformers model class. `forward` runs the model on a layout and passes the last hidden states on."""

    has_value_head = False
    precision: Precision
    # Timeout of waits for other ranks.
    wait: timedelta

    def __init__(self, config, *rest, **options) -> None:
        super().__init__(config, *rest, **options)
        if self.has_value_head:
            self.value_head = nn.Linear(config.hidden_size, 1)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """Splits the model before `from_pretrained` reads the weights.

        Applies transformers' tensor and expert parallelism, then keeps the layers of this stage, then applies FSDP2.
        Heads are tied before FSDP2. transformers ties them after FSDP2, which then treats them as two parameters, of
        which one would keep its old weights.
        """
        if mesh_manager is None:
            return model
        limit_waits(cls.wait)
        others = copy.copy(distributed_config)
        others.fsdp_size = others.pp_size = 1
        model = super().maybe_distribute_model(model, others, mesh_manager)
        model.config.distributed_config = distributed_config
        if distributed_config.pp_size > 1:
            model.keep_stage(mesh_manager.get_mesh("pp"))
        model.tie_weights(recompute_mapping=False)
        if isinstance(mesh_manager, DeviceMesh):
            # Before transformers 5.24, there is one mesh of the ranks over which FSDP2 shards.
            weights = experts = mesh_manager
        else:
            weights, experts = mesh_manager.get_mesh("fsdp"), mesh_manager.get_mesh("efsdp")
        shard(model, weights, experts, cls.precision)
        return model

    def keep_stage(self, stages: DeviceMesh) -> None:
        """Keeps the layers of this stage, the embedding on the first stage, and the final norm and heads on the last."""
        apply_pipeline_parallelism(self, stages)
        # The replaced forward pass accepts no trees, and lets only one stage work at a time.
        del self.forward
        if self.has_value_head and not self._pp_stage.pp_is_last_stage:
            del self.value_head

    def forward(self, layout: Layout | None, then, states: Tensor | None = None):
        """Returns `then(self, hidden)` for the hidden states [rows, width] that predict the next tokens or go to the
        next stage.

        `states` are the hidden states of the previous stage. `then` runs inside this method, where the head's weights
        are gathered.
        """
        if layout is None:
            return then(self, states)
        given = {"input_ids": layout.tokens[None]} if states is None else {"inputs_embeds": states[None]}
        hidden = self.base_model(
            **given, position_ids=layout.positions[None], use_cache=False, tree=layout
        ).last_hidden_state
        return then(self, hidden[0])

    def forward_sequences(self, tokens: Tensor, states: Tensor | None, last: bool) -> Tensor:
        """Computes one sequence as transformers does.

        Returns f32 logits [n, vocabulary] on the last stage, and on other stages the hidden states for the next stage.
        """
        given = {"input_ids": tokens[None]} if states is None else {"inputs_embeds": states[None]}
        self.config._attn_implementation, ours = "sdpa", self.config._attn_implementation
        try:
            if not last:
                return self.base_model(**given, use_cache=False).last_hidden_state[0]
            return super().forward(**given, use_cache=False).logits[0].float()
        finally:
            self.config._attn_implementation = ours

    def without_layers(self, states: Tensor) -> Tensor:
        """Runs hidden states [rows, width] through a stage whose layers are identities. They must come out unchanged."""
        base = self.base_model
        layers, norm = base.layers, base.norm
        base.layers, base.norm = nn.ModuleList(PipelineIdentityLayer() for _ in layers), PipelineIdentityLayer()
        try:
            return base(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
        finally:
            base.layers, base.norm = layers, norm

    @property
    def tied_name(self) -> str | None:
        """Name of the parameter that embedding and head share, if this stage and another stage have it."""
        stage = getattr(self, "_pp_stage", None)
        ends = stage and (stage.pp_is_first_stage or stage.pp_is_last_stage)
        if not ends or not getattr(self.config, "tie_word_embeddings", False):
            return None
        weight = self.get_input_embeddings().weight
        return next(name for name, parameter in self.named_parameters() if parameter is weight)


def check_config(directory: Path) -> AutoConfig:
    """Loads the configuration of a model that can be trained on trees.

    Raises `StartError` if there is no configuration, or if the model is of an unsupported kind.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise StartError(f"{directory} has no configuration that transformers reads: {error}") from None
    if not list(directory.glob("*.safetensors")):
        raise StartError(f"{directory} has no safetensors files; others are not loaded, since pickles run code")
    if getattr(config, "text_config", None) is not None:
        raise StartError(
            f"{directory} is a {config.model_type} with more than text; the learner trains its text model alone: give a "
            "folder of that"
        )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if odd := kinds - LAYERS:
        raise StartError(
            f"{directory} is a {config.model_type} with layers of the kinds {', '.join(sorted(odd))}; training on trees supports only {', '.join(LAYERS)}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise StartError(f"{directory} is a {config.model_type}, which is not a causal language model in transformers")
    return config


def load(
    directory: Path, ranks: Ranks, precision: Precision, value_head: bool = False, frozen: bool = False
) -> nn.Module:
    """Loads a sharded model from a directory. Collective."""
    config = check_config(directory)
    base = AutoModelForCausalLM._model_mapping[type(config)]
    model_class = type(
        base.__name__, (TreeModel, base), {"has_value_head": value_head, "precision": precision, "wait": ranks.wait}
    )
    shape = ranks.shape
    if shape.pipeline > config.num_hidden_layers:
        raise StartError(
            f"--pp {shape.pipeline}, but {directory} has {config.num_hidden_layers} layers, and a stage needs one"
        )
    _check_shares(config, directory, shape)
    split = DistributedConfig(tp_size=shape.tensor, fsdp_size=shape.shards, **_expert_options(shape))
    # Set afterwards, because transformers itself does not combine stages with FSDP2.
    split.pp_size = shape.pipeline
    model, report = model_class.from_pretrained(
        directory,
        config=config,
        dtype=precision.compute if frozen else torch.float32,
        attn_implementation=NAME,
        use_safetensors=True,
        local_files_only=True,
        distributed_config=split if shape.world > 1 else None,
        output_loading_info=True,
    )
    _check_report(directory, report)
    if shape.world > 1:
        _detach_from_files(model)
    else:
        model.to(ranks.device)
        _detach_from_files(model)
        alone = init_device_mesh(ranks.device.type, (1,))
        shard(model, alone, alone, precision)
    # Some groups are created when they are first needed.
    limit_waits(ranks.wait)
    if shape.pipeline > 1:
        _check_files_agree(model, directory, ranks)
    return _finish_loading(model, frozen, precision)


def _expert_options(shape: Shape) -> dict[str, Any]:
    """Returns transformers' options for expert parallelism.

    Raises `StartError` if this version of transformers cannot combine a split with FSDP2.
    """
    if COMBINES_SPLITS:
        return {"ep_size": shape.expert, "ep_implementation": "all_to_all" if shape.expert > 1 else "auto"}
    for option, ranks in (("tp", shape.tensor), ("ep", shape.expert), ("pp", shape.pipeline)):
        if ranks > 1:
            raise StartError(
                f"--{option} {ranks} needs transformers 5.24 or newer, but {transformers.__version__} is installed; "
                f"upgrade it, or leave out --{option}"
            )
    return {}


def _check_shares(config, directory: Path, shape: Shape) -> None:
    """Raises `StartError` if heads or experts cannot be split evenly."""
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    for what, count in (("heads", heads), ("heads of keys and values", kv_heads)):
        if count and count % shape.tensor:
            raise StartError(f"--tp {shape.tensor} does not divide the {count} {what} of {directory}")
    if shape.expert == 1:
        return
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not experts:
        raise StartError(
            f"--ep {shape.expert}, but {directory} is a {config.model_type} without experts; leave out --ep"
        )
    if experts % shape.expert:
        raise StartError(f"--ep {shape.expert} does not divide the {experts} experts of {directory}")


def _check_files_agree(model: nn.Module, directory: Path, ranks: Ranks) -> None:
    """Shares the file names of all stages' tensors with all stages, and checks that tied weights are equal."""
    conversions = ranks.pipeline.gather(getattr(model, "_weight_conversions", None))
    model._weight_conversions = max(conversions, key=lambda found: len(found or []))
    if (
        ranks.pipeline.last
        and model.tied_name
        and model.get_output_embeddings().weight is not model.get_parameter(model.tied_name)
    ):
        raise StartError(
            f"{directory} has a head that differs from the embedding, although its config.json ties them; "
            "set tie_word_embeddings to false there"
        )


def _detach_from_files(model: nn.Module) -> None:
    """Copies tensors out of mapped files, since mapped memory cannot be released (offload.py)."""
    for tensor in (*model.parameters(), *model.buffers()):
        part = local_shard(tensor)
        if part.untyped_storage().resizable():
            continue
        if isinstance(tensor, DTensor):
            # FSDP2 reads this attribute at the first forward pass.
            tensor._local_tensor = part.clone()
        else:
            tensor.data = part.clone()


def _check_report(directory: Path, report: dict) -> None:
    """Raises `StartError` if tensors are missing, unknown or of a different shape."""
    missing = sorted(name for name in report["missing_keys"] if not name.startswith("value_head."))
    unknown = sorted(name for name in report["unexpected_keys"] if "rotary_emb" not in name)
    for what, names in (("lack", missing), ("have unknown", unknown), ("have misshapen", report["mismatched_keys"])):
        if names:
            raise StartError(f"the safetensors files of {directory} {what} tensors: {', '.join(map(str, names))[:400]}")


def _finish_loading(model: nn.Module, frozen: bool, precision: Precision) -> nn.Module:
    """Prepares training: no dropout, no padding token, a value head of zeros."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # PyTorch keeps the gradient of the padding token at 0, but in some models this token also ends a turn.
    model.get_input_embeddings().padding_idx = None
    if hasattr(model, "value_head"):
        with torch.no_grad():
            for parameter in model.value_head.parameters():
                parameter.zero_()
    if frozen:
        model.requires_grad_(False)
    model.eval()
    if precision.recompute and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model


def max_context(config) -> int:
    """Returns the number of positions for which the model was made."""
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def count_parameters(model: nn.Module, ranks: Ranks) -> int:
    """Returns the number of parameters of all stages. Tied parameters count once."""
    found: dict[str, int] = {}
    for stage in ranks.pipeline.gather({name: p.numel() for name, p in model.named_parameters()}):
        found |= stage
    return sum(found.values())


def original_config(directory: Path) -> dict:
    """Returns `config.json` of a directory.

    Raises `storage` if the file is missing or is not JSON.
    """
    path = directory / "config.json"
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise storage_error(error, "read", path) from None
    except ValueError as error:
        raise VerbError("storage", f"{path} is not valid JSON: {error}") from None
