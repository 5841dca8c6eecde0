"""Formulas of policy losses for many tokens, in f64: value, derivative by log p, and whether a bound removed the
derivative.

Symbols: x = log p − log p_old, ρ = exp(x), A is the advantage, sg stops the gradient. There is one function for each
entry of `PolicyLoss` in the crate `levade-rl`, which contains the sources. tests/test_losses.py compares both.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Log-ratios are clamped to ± this bound before the exponential. Beyond it, a ratio is constant and has no gradient.
LOG_RATIO_BOUND = 20.0


@dataclass
class Point:
    """The point at which a loss is evaluated: columns of n terms in f64.

    Absent numbers are replaced: `old` by log p, and `behaviour` by `old`.
    """

    logp: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    has_reference: Tensor
    advantage: Tensor
    returns: Tensor
    value: Tensor
    path_log_ratio: Tensor
    marked: Tensor
    age: Tensor
    correction: Tensor

    @property
    def x(self) -> Tensor:
        """log p − log p_old."""
        return self.logp - self.old


@dataclass
class Surrogate:
    """Loss, its derivative, and flags: whether a bound was active, and whether it was the dual clip."""

    loss: Tensor
    slope: Tensor
    clipped: Tensor
    dual: Tensor

    def where(self, condition: Tensor, other: "Surrogate") -> "Surrogate":
        """Selects this result if the condition holds, and otherwise the other one."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("loss", "slope", "clipped", "dual"))
        return Surrogate(*(torch.where(condition, a, b) for a, b in pairs))


def without_clipping(loss: Tensor, slope: Tensor, clipped: Tensor | None = None) -> Surrogate:
    """Creates a loss with its derivative. By default, no bound is active."""
    none = torch.zeros_like(loss, dtype=torch.bool)
    return Surrogate(loss, slope, none if clipped is None else clipped, none)


def constant(loss: Tensor) -> Surrogate:
    """Creates a loss whose derivative was removed by a bound."""
    return without_clipping(loss, torch.zeros_like(loss), torch.ones_like(loss, dtype=torch.bool))


def bounded_exp(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns exp(x) with clamped x, and its derivative, which is 0 where x is clamped."""
    value = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return value, torch.where(x.abs() > LOG_RATIO_BOUND, 0.0, value)


def choose(condition: Tensor, a: float, b: float, like: Tensor) -> Tensor:
    """Selects one of two numbers per token, in the dtype of `like`. Between two Python numbers, torch.where computes
    in f32.
    """
    return torch.where(condition, torch.full_like(like, a), torch.full_like(like, b))


def reinforce(at: Point, advantage: Tensor) -> Surrogate:
    """−A log p."""
    return without_clipping(-advantage * at.logp, -advantage)


def importance_sampling(x: Tensor, advantage: Tensor) -> Surrogate:
    """−A ρ."""
    ratio, slope = bounded_exp(x)
    return without_clipping(-advantage * ratio, -advantage * slope, x.abs() > LOG_RATIO_BOUND)


def clip(x: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Surrogate:
    """max(−Aρ, −A·clip(ρ, 1 − low, 1 + high)); if A < 0, at most −A·dual."""
    found = importance_sampling(x, advantage)
    bounded = -advantage * bounded_exp(x)[0].clamp(1.0 - low, 1.0 + high)
    found = constant(bounded).where(bounded > found.loss, found)
    if dual is None:
        return found
    capped = constant(-advantage * dual)
    capped.dual = torch.ones_like(capped.dual)
    return capped.where((advantage < 0) & (found.loss > capped.loss), found)


def clip_keeping(x: Tensor, advantage: Tensor, low: float, high: float, keep: dict) -> Surrogate:
    """PPO's clip that keeps a part of the gradient beyond its bounds. With `in_value_only`, that part has no gradient."""
    ratio = bounded_exp(x)[0]
    below = (ratio < 1.0 - low) & (advantage < 0)
    above = (ratio > 1.0 + high) & (advantage > 0)
    kept = choose(below, keep["below"] * (1.0 - low), keep["above"] * (1.0 + high), ratio)
    if keep.get("in_value_only", False):
        unclipped, bounded = importance_sampling(x, advantage), -advantage * kept / ratio
        beyond = constant(bounded).where(bounded > unclipped.loss, unclipped)
    else:
        beyond = without_clipping(-advantage * kept, -advantage * kept, torch.ones_like(below))
    return beyond.where(below | above, clip(x, advantage, low, high))


def mini_rl(at: Point) -> Surrogate:
    """−sg(ρ) A log p."""
    weight = bounded_exp(at.x)[0] * at.advantage
    return without_clipping(-weight * at.logp, -weight)


def cispo(at: Point, low: float, high: float) -> Surrogate:
    """−sg(clip(ρ)) A log p."""
    ratio = bounded_exp(at.x)[0]
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    weight = bounded * at.advantage
    return without_clipping(-weight * at.logp, -weight, bounded != ratio)


def gspo(at: Point, low: float, high: float) -> Surrogate:
    """PPO's clip on the mean log-ratio of a sequence. The log-ratio is capped at 10 and has no gradient beyond."""
    bounded = at.path_log_ratio.clamp(max=10.0)
    found = clip(bounded, at.advantage, low, high)
    return constant(found.loss).where(bounded < at.path_log_ratio, found)


def geometric_mean(at: Point) -> Surrogate:
    """−A r, where r is the geometric mean of a sequence's clipped ratios. Only tokens that are not clipped (marked)
    move r.
    """
    ratio, slope = bounded_exp(at.path_log_ratio)
    loss = -at.advantage * ratio
    return without_clipping(loss, -at.advantage * slope).where(at.marked, constant(loss))


def soft_gate(at: Point, positive: float, negative: float) -> Surrogate:
    """−A (4/τ) σ(τ (ρ − 1)), where τ depends on the sign of A."""
    ratio, slope = bounded_exp(at.x)
    tau = choose(at.advantage > 0, positive, negative, ratio)
    gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp())
    return without_clipping(-at.advantage * 4.0 / tau * gate, -at.advantage * 4.0 * gate * (1.0 - gate) * slope)


def direct(at: Point, beta: float) -> Surrogate:
    """−(A log p − ½ β x²)."""
    x = at.x
    return without_clipping(-(at.advantage * at.logp - 0.5 * beta * x * x), -(at.advantage - beta * x))


def divergence(at: Point, measure: str, below: float, above: float, cap: float) -> Surrogate:
    """−A sg(min(ρ, cap)) log p, unless p has moved from p_old in the direction of A by more than allowed."""
    p, q = at.logp.exp(), at.old.exp()
    if measure == "total_variation":
        left = p - q
    else:
        rest = torch.where(q < 1.0, (1.0 - q) * ((1.0 - q) / (1.0 - p)).log(), 0.0)
        distance = q * (at.old - at.logp) + rest
        left = torch.where(p > q, distance, -distance)
    kept = torch.where(at.advantage > 0, left <= above, left >= -below)
    weight = bounded_exp(at.x)[0].clamp(max=cap) * at.advantage
    return without_clipping(-weight * at.logp, -weight).where(kept, constant(torch.zeros_like(p)))


def kl_cov(at: Point, coefficient: float) -> Surrogate:
    """−A ρ, plus c |x| for marked tokens."""
    found, x = importance_sampling(at.x, at.advantage), at.x
    c = coefficient * at.marked
    return Surrogate(found.loss + c * x.abs(), found.slope + c * x.sign(), found.clipped, found.dual)


def value(at: Point, clip: float | None) -> Surrogate:
    """½ max((V − R)², (clip(V, V_old ± c) − R)²), where V is passed as log p."""
    error = at.logp - at.returns
    found = without_clipping(0.5 * error * error, error)
    if clip is None:
        return found
    bounded = torch.minimum(torch.maximum(at.logp, at.value - clip), at.value + clip) - at.returns
    return constant(0.5 * bounded * bounded).where(bounded * bounded > error * error, found)


def surrogate(policy: str, options: dict, at: Point) -> Surrogate:
    """Evaluates a policy loss by its name in recipes."""
    o = {name: option for name, option in options.items() if name not in ("trust", "keep", "share", "lower", "upper")}
    match policy:
        case "cross_entropy":
            return reinforce(at, torch.ones_like(at.logp))
        case "reinforce":
            return reinforce(at, at.advantage)
        case "importance_sampling":
            return importance_sampling(at.x, at.advantage)
        case "clip" if options.get("keep"):
            return clip_keeping(at.x, at.advantage, options["low"], options["high"], options["keep"])
        case "clip" | "clip_cov":
            return clip(at.x, at.advantage, **o)
        case "mini_rl":
            return mini_rl(at)
        case "cispo":
            return cispo(at, **o)
        case "gspo":
            return gspo(at, **o)
        case "geometric_mean":
            return geometric_mean(at)
        case "soft_gate":
            return soft_gate(at, **o)
        case "direct":
            return direct(at, **o)
        case "divergence":
            return divergence(at, **o)
        case "kl_cov":
            return kl_cov(at, **o)
        case "value":
            return value(at, options.get("clip"))
    raise AssertionError(policy)
