"""AdamW with decoupled weight decay on matrices, after clipping of the global norm, over each rank's own shards.

Moments are f32 and are stored on the weights' device. A parameter without a gradient counts as one whose gradient is
0.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from .errors import invalid_request
from .mesh import Ranks

NUMBERS = ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "max_grad_norm")


@dataclass(frozen=True)
class OptimizerParams:
    """Parameters of one step: `OptimParams` of the crate `levade-policy`. An infinite `max_grad_norm` (null in JSON)
    disables clipping.
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float

    @staticmethod
    def parse(found: dict) -> "OptimizerParams":
        """Parses the parameters. Raises `invalid` with the missing, unknown or non-numeric one."""
        if not isinstance(found, dict):
            raise invalid_request(f"params must be an object with {', '.join(NUMBERS)}")
        if odd := found.keys() ^ set(NUMBERS):
            raise invalid_request(
                f"params must have {', '.join(NUMBERS)}" + (f", not {', '.join(sorted(odd))}" if found else "")
            )
        numbers = {
            name: math.inf if name == "max_grad_norm" and found[name] is None else found[name] for name in NUMBERS
        }
        for name, number in numbers.items():
            if not isinstance(number, int | float) or math.isnan(number):
                raise invalid_request(f"{name} of the optimizer is {number!r}; it must be a number")
        return OptimizerParams(**{name: float(number) for name, number in numbers.items()})


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def count_copies(parameter: Tensor, ranks: int) -> int:
    """Returns how many ranks of a stage hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return ranks
    mesh = parameter.device_mesh
    parts = math.prod(mesh.size(dim) for dim, placed in enumerate(parameter.placements) if not placed.is_replicate())
    return ranks // parts


class Optimizer:
    """AdamW state of a stage's trained parameters, by name. The `tied` parameter of the first and last stage gets
    equal updates on both.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], ranks: Ranks, tied: str | None) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.tied = tied if tied in parameters else None
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}
        self.steps = 0

    def ensure(self) -> None:
        """Allocates missing moments."""
        for name, parameter in self.parameters.items():
            for moments in (self.first, self.second):
                if name not in moments:
                    moments[name] = torch.zeros_like(local_shard(parameter), dtype=torch.float32)

    def clear(self) -> None:
        """Drops accumulated gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Returns this rank's part of the accumulated gradients."""
        found = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None:
                found[name] = torch.zeros_like(local_shard(parameter))
            elif isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
                found[name] = local_shard(gradient.redistribute(placements=parameter.placements))
            else:
                found[name] = local_shard(gradient)
        if self.tied:
            self.ranks.pipeline.sum_ends(found[self.tied], self.ranks.device)
        return found

    def norm(self, gradients: dict[str, Tensor], control: dist.ProcessGroup) -> float:
        """Computes the gradient norm over all ranks, in f64. All ranks get the same bits."""
        squares = 0.0
        for name, gradient in gradients.items():
            if name == self.tied and not self.ranks.pipeline.first:
                continue
            total = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            squares += total.item() / count_copies(self.parameters[name], self.ranks.shape.stage)
        gathered = [torch.zeros(1, dtype=torch.float64) for _ in range(self.ranks.shape.world)]
        dist.all_gather(gathered, torch.tensor([squares], dtype=torch.float64), group=control)
        return math.sqrt(sum(part.item() for part in gathered))

    def step(self, params: OptimizerParams, control: dist.ProcessGroup) -> dict:
        """Takes one step with the accumulated gradients, and clears them.

        A non-finite gradient changes nothing. Returns `OptimReport`.
        """
        self.ensure()
        gradients = self.gradients()
        norm = self.norm(gradients, control)
        applied = math.isfinite(norm)
        if applied:
            if norm > params.max_grad_norm:
                torch._foreach_mul_(list(gradients.values()), params.max_grad_norm / (norm + 1e-6))
            self.steps += 1
            matrices = [name for name, parameter in self.parameters.items() if parameter.ndim >= 2]
            others = [name for name, parameter in self.parameters.items() if parameter.ndim < 2]
            self._update(matrices, gradients, params, params.weight_decay)
            self._update(others, gradients, params, 0.0)
        self.clear()
        return {"grad_norm": norm if applied else None, "applied": applied}

    @torch.no_grad()
    def _update(self, names: list[str], gradients: dict[str, Tensor], params: OptimizerParams, decay: float) -> None:
        if not names:
            return
        weights = [local_shard(self.parameters[name]) for name in names]
        # `adamw` increments the step itself.
        before = [torch.tensor(float(self.steps - 1), device=w.device) for w in weights]
        adamw(
            weights,
            [gradients[name] for name in names],
            [self.first[name] for name in names],
            [self.second[name] for name in names],
            [],
            before,
            fused=True,
            amsgrad=False,
            beta1=params.beta1,
            beta2=params.beta2,
            lr=params.learning_rate,
            weight_decay=decay,
            eps=params.epsilon,
            maximize=False,
        )
