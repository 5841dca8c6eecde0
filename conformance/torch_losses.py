"""Levade's losses for autograd: values as functions of log-probabilities, with detached constants.

`levade_torch` computes derivatives by formula; here PyTorch derives them. A term is a dictionary of f64 tensors. Names
are those of `Loss` in JSON.
"""

import torch
from torch import Tensor

CLIP = {"low": 0.2, "high": 0.28}
TRUST = {"cap": 2.0, "age_decay": 0.1}
MASKED, CLAMPED = {"mask": {"low": 0.7, "high": 1.5}}, {"clamp": {"low": 0.5, "high": 2.0}}
ESTIMATORS = ("k1", "k2", "k3", "absolute", "k1_with_k2_gradient", "k3_with_k2_gradient")

POLICIES = {
    "cross_entropy": "cross_entropy",
    "reinforce": "reinforce",
    "importance_sampling": "importance_sampling",
    "clip": {"clip": CLIP},
    "clip, dual": {"clip": CLIP | {"dual": 1.5}},
    "clip, trust": {"clip": CLIP | {"trust": TRUST}},
    "clip, strict trust": {"clip": CLIP | {"trust": TRUST | {"strict": True}}},
    "clip, keep": {"clip": CLIP | {"keep": {"below": 0.5, "above": 0.25}}},
    "clip, keep a value": {"clip": CLIP | {"keep": {"below": 0.5, "above": 0.25, "in_value_only": True}}},
    "mini_rl": {"mini_rl": CLIP | {"trust": TRUST}},
    "cispo": {"cispo": CLIP},
    "gspo": {"gspo": CLIP},
    "geometric_mean": {"geometric_mean": {"low": 0.4, "high": 0.4}},
    "soft_gate": {"soft_gate": {"positive": 1.0, "negative": 1.05}},
    "direct": {"direct": {"beta": 0.5}},
    "divergence, tv": {"divergence": {"measure": "total_variation", "below": 0.01, "above": 0.02, "cap": 1.5}},
    "divergence, kl": {"divergence": {"measure": "kl", "below": 0.01, "above": 0.02, "cap": 1.5}},
    "kl_cov": {"kl_cov": {"coefficient": 0.5, "share": 0.2}},
    "clip_cov": {"clip_cov": CLIP | {"share": 0.2, "lower": 0.1, "upper": 5.0}},
}


def losses() -> dict[str, dict]:
    """Yields every policy loss, and the clip with every KL estimator, an entropy bonus, and interpolated proximal
    policies.
    """
    found = {name: {"policy": policy} for name, policy in POLICIES.items()}
    clip = {"policy": {"clip": CLIP | {"dual": 1.5}}}
    for estimator in ESTIMATORS:
        kl = {"estimator": estimator, "coefficient": 0.3}
        found[f"clip, {estimator}"] = clip | {"kl": kl}
        found[f"clip, weighted {estimator}"] = clip | {"kl": kl | {"importance_weighted": True}}
    for by in ("log_linear", "linear"):
        for bound in (MASKED, CLAMPED):
            found[f"clip, {by}, {next(iter(bound))}"] = clip | {"interpolated": {"by": by, "bound": bound}}
    found["clip, entropy"] = clip | {"entropy": 0.01}
    return found


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """Returns PPO's clip of a ratio."""
    value = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return value if dual is None else torch.where(advantage < 0, torch.minimum(value, -advantage * dual), value)


def kept(ratio: Tensor, advantage: Tensor, o: dict) -> Tensor:
    """Returns the clip of CE-GPPO, or of AgentRL, whose kept part has no gradient."""
    low, high, keep = o["low"], o["high"], o["keep"]
    below, above = (ratio < 1 - low) & (advantage < 0), (ratio > 1 + high) & (advantage > 0)
    beyond = torch.where(below, keep["below"] * (1 - low), keep["above"] * (1 + high)).double()
    held = ratio.detach()
    replaced = -advantage * beyond * ratio / held
    if keep.get("in_value_only"):
        replaced = torch.maximum(-advantage * ratio, -advantage * beyond / held)
    return torch.where(below | above, replaced, clipped(ratio, advantage, low, high))


def policy_value(policy: str | dict, logp: Tensor, old: Tensor, t: dict) -> Tensor:
    """Returns the policy part of a loss."""
    name, o = (policy, {}) if isinstance(policy, str) else next(iter(policy.items()))
    a, ratio = t["advantage"], (logp - old).exp()
    held = ratio.detach()
    # A sequence's ratio is known beforehand, and every token carries its gradient.
    of_path = (t["path_log_ratio"] + logp - logp.detach()).exp()
    keep = torch.ones_like(a, dtype=torch.bool)
    if "trust" in o:
        scale = (
            torch.ones_like(a)
            if o["trust"].get("strict")
            else o["trust"]["cap"] * (-o["trust"]["age_decay"] * t["age"]).exp()
        )
        keep = ~(((held > 1 + o["high"] * scale) & (a > 0)) | ((held < 1 - o["low"] * scale) & (a < 0)))
    if name == "clip_cov":
        keep = ~t["marked"]
    if name == "divergence":
        p, q = logp.detach().exp(), old.exp()
        left = p - q
        if o["measure"] == "kl":
            distance = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
            left = torch.where(p > q, distance, -distance)
        keep = torch.where(a > 0, left <= o["above"], left >= -o["below"])
    if name == "clip" and "keep" in o:
        value = kept(ratio, a, o)
    elif name in ("clip", "clip_cov"):
        value = clipped(ratio, a, o["low"], o["high"], o.get("dual"))
    elif name == "soft_gate":
        tau = torch.where(a > 0, o["positive"], o["negative"]).double()
        value = -a * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    else:
        value = {
            "cross_entropy": lambda: -logp,
            "reinforce": lambda: -a * logp,
            "importance_sampling": lambda: -a * ratio,
            "mini_rl": lambda: -held * a * logp,
            "cispo": lambda: -held.clamp(1 - o["low"], 1 + o["high"]) * a * logp,
            "gspo": lambda: clipped(of_path, a, o["low"], o["high"]),
            "geometric_mean": lambda: -a * torch.where(t["marked"], of_path, of_path.detach()),
            "direct": lambda: -(a * logp - o["beta"] / 2 * (logp - old) ** 2),
            "divergence": lambda: -a * held.clamp(max=o["cap"]) * logp,
            "kl_cov": lambda: -a * ratio + o["coefficient"] * t["marked"] * (logp - old).abs(),
        }[name]()
    return torch.where(keep, value, 0.0)


def penalty(kl: dict, logp: Tensor, behaviour: Tensor, t: dict) -> Tensor:
    """Returns the estimated divergence from the reference."""
    x = logp - t["reference"]
    estimates = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() + x - 1, "absolute": x.abs()}
    value, _, swapped = kl["estimator"].partition("_with_")
    found = estimates[value]
    if swapped:
        found = found.detach() + estimates["k2"] - estimates["k2"].detach()
    if kl.get("importance_weighted"):
        ratio = (logp - behaviour).exp()
        found = (ratio.detach() if swapped else ratio) * found
    return kl["coefficient"] * found


def term_losses(loss: dict, logp: Tensor, entropy: Tensor, t: dict) -> Tensor:
    """Returns weight × loss of every term, at log-probabilities and entropies in f64."""
    behaviour, proximal = t["behaviour"], t["proximal"]
    old = torch.where(proximal.isnan(), behaviour, proximal)
    correction = torch.where(t["correction"].isnan(), 1.0, t["correction"])
    if guess := loss.get("interpolated"):
        alpha, now = (t["age"] - 1).clamp(min=0) / t["age"].clamp(min=1), logp.detach()
        old = behaviour + alpha * (now - behaviour)
        if guess["by"] == "linear":
            old = ((1 - alpha) * behaviour.exp() + alpha * now.exp()).log()
        ((kind, bound),) = guess["bound"].items()
        ratio = (old - behaviour).exp()
        inside = (ratio >= bound["low"]) & (ratio <= bound["high"])
        correction = ratio.clamp(**{"min": bound["low"], "max": bound["high"]}) if kind == "clamp" else ratio * inside
    value = correction * policy_value(loss["policy"], logp, old, t)
    if loss.get("kl"):
        value = value + penalty(loss["kl"], logp, behaviour, t)
    return t["weight"] * (value - loss.get("entropy", 0.0) * entropy)
