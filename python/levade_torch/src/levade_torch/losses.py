"""The losses of Levade's recipes: parses, checks and evaluates them on the terms of a batch.

The loss of a batch is the sum of weight × loss over its terms. Evaluation uses f64, from f32 log-probabilities.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Terms
from .errors import invalid_request
from .surrogate import LOG_RATIO_BOUND, Point, bounded_exp, constant, surrogate

# Options of every policy loss; `?` marks optional ones.
POLICIES: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "reinforce": (),
    "importance_sampling": (),
    "clip": ("low", "high", "dual?", "trust?", "keep?"),
    "mini_rl": ("low", "high", "trust"),
    "cispo": ("low", "high"),
    "gspo": ("low", "high"),
    "geometric_mean": ("low", "high"),
    "soft_gate": ("positive", "negative"),
    "direct": ("beta",),
    "divergence": ("measure", "below", "above", "cap"),
    "kl_cov": ("coefficient", "share"),
    "clip_cov": ("low", "high", "share", "lower", "upper"),
    "value": ("clip?",),
}
ESTIMATORS = ("k1", "k2", "k3", "absolute", "k1_with_k2_gradient", "k3_with_k2_gradient")
NO_RATIOS = ("cross_entropy", "reinforce", "value")
PATH_RATIOS = ("gspo", "geometric_mean")


@dataclass
class Evaluated:
    """Loss contributions of terms before weighting, columns of n: `Evaluated` of the crate `levade-rl`."""

    loss: Tensor
    slope: Tensor
    ratio: Tensor
    log_ratio: Tensor
    clipped: Tensor
    dual: Tensor
    dropped: Tensor
    kl: Tensor


def estimate(estimator: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a KL estimate and its derivative by log p, at x = log p − log p_ref."""
    match estimator:
        case "k1":
            return x, torch.ones_like(x)
        case "k2":
            return 0.5 * x * x, x
        case "k3":
            inverse = bounded_exp(-x)[0]
            return inverse + x - 1.0, 1.0 - inverse
        case "absolute":
            return x.abs(), x.sign()
        case "k1_with_k2_gradient":
            return x, x
    return estimate("k3", x)[0], x


@dataclass(frozen=True)
class Loss:
    """An objective: `Loss` of the crate `levade-rl`."""

    policy: str
    options: dict
    kl: dict | None
    entropy: float
    interpolated: dict | None

    @staticmethod
    def parse(found: Any) -> "Loss":
        """Parses a loss from JSON.

        Raises `invalid` with the wrong key or number.
        """
        if not isinstance(found, dict) or "policy" not in found:
            raise invalid_request(f'the loss {found!r} is not an object with "policy"')
        if unknown := found.keys() - {"policy", "kl", "entropy", "interpolated"}:
            raise invalid_request(f"the loss has the unknown keys {', '.join(sorted(unknown))}")
        policy = found["policy"]
        name, options = (policy, {}) if isinstance(policy, str) else next(iter(policy.items()), ("", {}))
        if name not in POLICIES:
            raise invalid_request(f"unknown loss {name!r}; available losses: {', '.join(POLICIES)}")
        options = {key: option for key, option in (options or {}).items() if option is not None}
        known = {key.rstrip("?") for key in POLICIES[name]}
        if unknown := options.keys() - known:
            raise invalid_request(
                f"the loss {name} does not have the option {', '.join(sorted(unknown))}; its options: {', '.join(sorted(known))}"
            )
        if missing := [key for key in POLICIES[name] if not key.endswith("?") and key not in options]:
            raise invalid_request(f"the loss {name} requires {', '.join(missing)}")
        loss = Loss(name, options, found.get("kl"), float(found.get("entropy") or 0.0), found.get("interpolated"))
        loss._check_numbers()
        return loss

    @property
    def is_of_values(self) -> bool:
        """Whether the loss trains values instead of log-probabilities."""
        return self.policy == "value"

    def _check_numbers(self) -> None:
        nested = {"kl": self.kl, "trust": self.options.get("trust"), "keep": self.options.get("keep")}
        numbers = {**self.options, "entropy": self.entropy}
        for group, inner in nested.items():
            numbers |= {f"{group}.{key}": number for key, number in (inner or {}).items()}
        for key, number in numbers.items():
            if isinstance(number, float | int) and not math.isfinite(number):
                raise invalid_request(f"{key} of the loss {self.policy} is {number}; it must be finite")
        if self.kl is not None and self.kl.get("estimator") not in ESTIMATORS:
            raise invalid_request(
                f"the KL estimator {self.kl.get('estimator')!r} is unknown; available estimators: {', '.join(ESTIMATORS)}"
            )
        if self.options.get("measure", "kl") not in ("total_variation", "kl"):
            raise invalid_request(
                f"the measure {self.options['measure']!r} is unknown; available measures: total_variation, kl"
            )
        if self.is_of_values and (self.kl is not None or self.entropy != 0.0):
            raise invalid_request("a value loss takes no KL penalty and no entropy bonus; leave them out")

    def check(self, terms: Terms) -> None:
        """Checks that every term has the numbers that the loss needs, and that the loss can be evaluated.

        Raises `invalid` with the first incomplete term, its sequence and the missing number, or with the wrong option.
        """
        weighs = self.kl is not None and self.kl.get("importance_weighted", False)
        if self.policy not in NO_RATIOS or weighs:
            self._need(terms, "a behaviour log-probability", np.isnan(terms.behaviour) & np.isnan(terms.proximal))
        if self.kl is not None:
            self._need(terms, "a reference log-probability", np.isnan(terms.reference))
        if self.is_of_values and "clip" in self.options:
            self._need(terms, "the value before", np.isnan(terms.value))
        if self.policy in PATH_RATIOS:
            self._need(terms, "the log-ratio of its path", np.isnan(terms.path_log_ratio))
        for name in ("weight", "advantage", "returns"):
            self._need(terms, f"a finite {name}", ~np.isfinite(getattr(terms, name)))
        for name in ("value", "behaviour", "proximal", "reference", "path_log_ratio", "correction"):
            self._need(terms, f"a finite {name}", np.isinf(getattr(terms, name)))
        # Nested options are not checked anywhere else before the ranks start computing.
        try:
            self.evaluate(torch.zeros(0), Terms.empty())
        except Exception as odd:
            raise invalid_request(
                f"an option of the loss {self.policy} is missing or not a number: {type(odd).__name__}: {odd}"
            ) from None

    def _need(self, terms: Terms, what: str, lacking: np.ndarray) -> None:
        if lacking.any():
            at = int(np.argmax(lacking))
            raise invalid_request(f"term {at} (path {terms.path[at]}) lacks {what}, which the loss {self.policy} needs")

    def point(self, logp: Tensor, terms: Terms) -> Point:
        """Returns the point of evaluation of the terms, at log-probabilities (or values) `logp` [n] in f64."""

        def column(name: str) -> Tensor:
            return torch.from_numpy(getattr(terms, name).astype(np.float64))

        def present(found: Tensor, otherwise: Tensor) -> Tensor:
            return torch.where(found.isnan(), otherwise, found)

        behaviour, reference = column("behaviour"), column("reference")
        old = present(present(column("proximal"), behaviour), logp)
        correction = present(column("correction"), torch.ones_like(logp))
        age = column("age")
        if self.interpolated is not None:
            proximal, weight = self._interpolate(behaviour, logp, age)
            old, correction = present(proximal, old), present(weight, correction)
        return Point(
            logp=logp,
            old=old,
            behaviour=present(behaviour, old),
            reference=present(reference, logp),
            has_reference=~reference.isnan(),
            advantage=column("advantage"),
            returns=column("returns"),
            value=present(column("value"), logp),
            path_log_ratio=present(column("path_log_ratio"), logp - old),
            marked=torch.from_numpy(terms.marked),
            age=age,
            correction=correction,
        )

    def _interpolate(self, behaviour: Tensor, logp: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the interpolated proximal log-probability and its importance weight; NaN if no policy sampled the
        token.
        """
        alpha = torch.where(age >= 1, (age - 1.0) / age.clamp(min=1.0), 0.0)
        if self.interpolated["by"] == "log_linear":
            proximal = behaviour + alpha * (logp - behaviour)
        else:
            proximal = ((1.0 - alpha) * behaviour.exp() + alpha * logp.exp()).log()
        ((kind, bound),) = self.interpolated["bound"].items()
        ratio = (proximal - behaviour).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        low, high = bound.get("low", 0.0), bound["high"]
        if kind == "clamp":
            return proximal, ratio.clamp(low, high)
        inside = (ratio >= low) & (ratio <= high)
        return proximal, torch.where(ratio.isnan(), ratio, torch.where(inside, ratio, 0.0))

    def _drops(self, at: Point, ratio: Tensor) -> Tensor:
        """Returns which tokens lose their policy part: those outside the trust region, or marked ones."""
        if self.policy == "clip_cov":
            return at.marked
        trust = self.options.get("trust")
        if trust is None:
            return torch.zeros_like(at.marked)
        decay = (-trust.get("age_decay", 0.0) * at.age).clamp(max=0.0).exp()
        scale = torch.ones_like(decay) if trust.get("strict", False) else trust.get("cap", 4.0) * decay
        lower, upper = 1.0 - self.options["low"] * scale, 1.0 + self.options["high"] * scale
        return ((ratio > upper) & (at.advantage > 0)) | ((ratio < lower) & (at.advantage < 0))

    def evaluate(self, logp: Tensor, terms: Terms) -> Evaluated:
        """Computes every term's loss and derivative, at f32 log-probabilities (or values) `logp` [n]."""
        at = self.point(logp.double(), terms)
        x = at.x
        ratio = bounded_exp(x)[0]
        dropped = self._drops(at, ratio)
        found = constant(torch.zeros_like(x)).where(dropped, surrogate(self.policy, self.options, at))
        kl = slope = torch.zeros_like(x)
        coefficient = 0.0
        if self.kl is not None:
            coefficient = self.kl["coefficient"]
            kl, slope = self._penalty(at)
            kl, slope = (torch.where(at.has_reference, part, 0.0) for part in (kl, slope))
        left_out = at.correction == 0.0
        return Evaluated(
            loss=at.correction * found.loss + coefficient * kl,
            slope=at.correction * found.slope + coefficient * slope,
            ratio=ratio,
            log_ratio=x,
            clipped=found.clipped | left_out,
            dual=found.dual & ~left_out,
            dropped=dropped | left_out,
            kl=kl,
        )

    def _penalty(self, at: Point) -> tuple[Tensor, Tensor]:
        """Returns each token's divergence from the reference, and its derivative by log p."""
        value, slope = estimate(self.kl["estimator"], at.logp - at.reference)
        if not self.kl.get("importance_weighted", False):
            return value, slope
        ratio, through = bounded_exp(at.logp - at.behaviour)
        if self.kl["estimator"].endswith("gradient"):
            return ratio * value, ratio * slope
        return ratio * value, ratio * slope + through * value
