"""The ranks of a group: pipeline × data × context × tensor parallel, with experts split over ranks of a stage."""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import StartError
from .layout import Context
from .pipeline import Pipeline


@dataclass(frozen=True)
class Shape:
    """Sizes of a group: `world` processes are `pipeline` × `data` × `context` × `tensor`, with tensor as the fastest
    dimension.

    Stages are the outermost dimension. They communicate least, so they are the dimension to spread over machines. The
    weights of a stage are sharded over data × context, and experts over `expert` neighboring ranks.
    """

    world: int
    tensor: int
    context: int
    expert: int
    pipeline: int = 1

    @property
    def stage(self) -> int:
        """Number of ranks per stage."""
        return self.world // self.pipeline

    @property
    def shards(self) -> int:
        """Number of ranks over which the weights of a stage are sharded (FSDP2)."""
        return self.stage // self.tensor

    @property
    def data(self) -> int:
        """Number of data-parallel ranks, which process micro-batches."""
        return self.shards // self.context

    def check(self) -> None:
        """Raises `StartError` if the sizes do not match the number of processes."""
        sizes = {"--tp": self.tensor, "--cp": self.context, "--ep": self.expert, "--pp": self.pipeline}
        for name, size in sizes.items():
            if size < 1:
                raise StartError(f"{name} {size}; it must be at least 1")
        if self.world % (self.tensor * self.context * self.pipeline):
            raise StartError(
                f"{self.world} processes do not divide into --tp {self.tensor} × --cp {self.context} × --pp {self.pipeline}; "
                "start a multiple of their product with --nproc-per-node and --nnodes"
            )
        if self.expert > 1 and (self.expert % self.tensor or self.stage % self.expert):
            raise StartError(
                f"--ep {self.expert} must be a multiple of --tp {self.tensor} and divide the {self.stage} processes of a stage"
            )


@dataclass(frozen=True)
class Ranks:
    """The coordinates of this process in the group."""

    shape: Shape
    rank: int
    device: torch.device
    context: Context
    pipeline: Pipeline = field(default_factory=Pipeline)
    # Process group of the ranks in this stage; None if there is only one stage.
    stage: dist.ProcessGroup | None = None
    # Timeout of waits for other ranks.
    wait: timedelta = timedelta(minutes=10)

    @property
    def data(self) -> int:
        """Data-parallel index of this process, which context and tensor parallel ranks share."""
        return self.rank % self.shape.stage // (self.shape.tensor * self.shape.context)

    @property
    def reports(self) -> bool:
        """Whether this rank reports the result, among the ranks that compute the same result."""
        return self.rank % self.shape.tensor == 0 and self.pipeline.last

    @staticmethod
    def of(shape: Shape, device: torch.device, seconds: float) -> "Ranks":
        """Joins the groups of this process, in which waits time out after `seconds`. Collective over all processes."""
        rank, wait = dist.get_rank(), timedelta(seconds=seconds)
        context, stage = Context(), None
        for first in range(0, shape.world, shape.tensor * shape.context):
            for offset in range(shape.tensor):
                members = [first + offset + shape.tensor * i for i in range(shape.context)]
                group = dist.new_group(members, timeout=wait) if shape.context > 1 else None
                if rank in members:
                    context = Context(shape.context, members.index(rank), group)
        for first in range(0, shape.world, shape.stage) if shape.pipeline > 1 else ():
            members = list(range(first, first + shape.stage))
            group = dist.new_group(members, timeout=wait)
            stage = group if rank in members else stage
        pipeline = Pipeline.of(shape.pipeline, shape.world, rank, seconds)
        return Ranks(shape, rank, device, context, pipeline, stage, wait)


def limit_waits(wait: timedelta) -> None:
    """Sets the timeout of all process groups in this process. The groups of meshes would wait for half an hour."""
    for group in list(dist.distributed_c10d._world.pg_map):
        # PyTorch 2.11 has this function under a private name, with the same parameters.
        set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout
        set_timeout(wait, group)


def choose_device(name: str) -> torch.device:
    """Returns the device of this process: `cpu`, `cuda`, or with `auto` the available one.

    Raises `StartError` if there is no such device, or if this build of PyTorch has no code for it.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise StartError("--device cuda, but PyTorch sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= count:
        raise StartError(
            f"process {local} of this machine has no GPU: the machine has {count}; start at most one process per GPU"
        )
    major, minor = torch.cuda.get_device_capability(local)
    built = torch.cuda.get_arch_list()
    if not any(
        arch.startswith(("sm_", "compute_")) and int(arch.split("_")[1].rstrip("af")) // 10 == major for arch in built
    ):
        raise StartError(
            f"GPU {local} has the architecture sm_{major}{minor}, and this build of PyTorch {torch.__version__} has code for "
            f"{', '.join(built)}; install one that has it"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
