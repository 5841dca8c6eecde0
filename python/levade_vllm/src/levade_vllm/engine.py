"""The weight transfer engine of a vLLM worker. It joins a gloo group, in which rank 0 broadcasts one weight after
another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)


@dataclass
class Init(WeightTransferInitInfo):
    """The rendezvous of the group: a store that rank 0 serves. `timeout_seconds` limits each wait."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    timeout_seconds: float


@dataclass
class Update(WeightTransferUpdateInfo):
    """The tensors of an update, in the order of their broadcasts."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[Init, Update]):
    """Receives weights in the layout of model files, and loads them as vLLM does from a file."""

    init_info_cls = Init
    update_info_cls = Update

    group: dist.ProcessGroupGloo | None = None

    def init_transfer_engine(self, init_info: Init) -> None:
        """Joins the group. Returns when all members have joined."""
        self.shutdown()
        config = self.parallel_config
        rank = init_info.rank_offset + config.data_parallel_index * config.world_size + config.rank
        timeout = timedelta(seconds=init_info.timeout_seconds)
        address, port, world, name = (
            init_info.master_address,
            init_info.master_port,
            init_info.world_size,
            init_info.group_name,
        )
        store = dist.TCPStore(address, port, world, False, timeout)
        # The prefixes that `torch.distributed` uses for the parts of a store.
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        self.group = dist.ProcessGroupGloo(store, rank, world, timeout)

    def start_weight_update(self) -> None:
        """Prepares layers to receive weights. The model cannot run until the end of the update."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Finishes the update, after which the model runs again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        # A head that is tied to the embedding was not loaded itself. It multiplies by its own packed copy.
        head = getattr(self.model, "lm_head", None)
        if getattr(self.model_config.hf_config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
            head.quant_method.process_weights_after_loading(head)

    def update_weights(self, update_info: dict) -> None:
        """Receives all weights of one update. There is no accelerator to synchronize with."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Receives one tensor after another."""
        if self.group is None:
            raise RuntimeError("this worker has joined no group; call /init_weight_transfer_engine first")
        self.model.load_weights(self._received(update_info))

    def _received(self, update: Update) -> Iterator[tuple[str, Tensor]]:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, dtype, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast([tensor], options).wait()
            yield name, tensor

    def shutdown(self) -> None:
        """Leaves the group. If rank 0 is still sending, its broadcast fails at once."""
        self.group = None
