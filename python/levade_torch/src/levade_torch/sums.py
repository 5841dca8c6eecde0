"""Statistics of a forward and backward pass: `ForwardBackward` of the crate `levade-policy`. All are sums or extrema."""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from .batch import Terms
from .losses import Evaluated


@dataclass
class Sums:
    """Sums over the terms of a micro-batch. `ForwardBackward` documents the fields."""

    loss: float = 0.0
    tokens: int = 0
    targets: int = 0
    terms: int = 0
    nll: float = 0.0
    entropy: float = 0.0
    clipped: int = 0
    dual_clipped: int = 0
    kl: float = 0.0
    ratio: float = 0.0
    drift: float = 0.0
    behaviour_terms: int = 0
    mismatched: int = 0
    max_mismatch: float = 0.0

    def json(self) -> dict:
        """Returns the JSON form."""
        return asdict(self)

    def merge(self, other: "Sums") -> None:
        """Adds the sums of another part."""
        for name, value in asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name == "max_mismatch" else mine + value)

    def add_terms(self, terms: Terms, logp: Tensor, entropy: Tensor, found: Evaluated) -> None:
        """Adds terms of a policy loss, at log-probabilities `logp` [n] (f32) and entropies [n] of their tokens."""
        behaviour = torch.from_numpy(np.ascontiguousarray(terms.behaviour))
        has_behaviour = ~behaviour.isnan()
        same_weights = has_behaviour & torch.from_numpy(terms.age == 0)
        differs = behaviour.view(torch.int32) != logp.view(torch.int32)
        self.mismatched += int((differs & same_weights).sum())
        if same_weights.any():
            self.max_mismatch = max(self.max_mismatch, float((behaviour - logp)[same_weights].abs().max()))
        weight = torch.from_numpy(terms.weight.astype(np.float64))
        weighs = weight != 0.0
        ratios = weighs & has_behaviour
        self.loss += float((weight * found.loss)[weighs].sum())
        self.terms += int(weighs.sum())
        self.nll -= float(logp.double()[weighs].sum())
        self.entropy += float(entropy.double()[weighs].sum())
        self.clipped += int((found.clipped & ~found.dual & weighs).sum())
        self.dual_clipped += int((found.dual & weighs).sum())
        self.kl += float(found.kl[weighs].sum())
        self.behaviour_terms += int(ratios.sum())
        self.ratio += float(found.ratio[ratios].sum())
        self.drift -= float(found.log_ratio[ratios].sum())

    def add_values(self, terms: Terms, found: Evaluated) -> None:
        """Adds terms of a value loss."""
        weight = torch.from_numpy(terms.weight.astype(np.float64))
        weighs = weight != 0.0
        self.loss += float((weight * found.loss)[weighs].sum())
        self.terms += int(weighs.sum())
        self.clipped += int((found.clipped & weighs).sum())
