"""Creates training batches: sequences of different lengths with shared prefixes and targets, for Levade and for
PyTorch.

A sequence has the JSON form of `SequenceInput` of the crate `levade-tree`; a loss has that of `Loss` of `levade-rl`. The
losses are reimplemented here in PyTorch, on each sequence separately.
"""

import random

import torch

CROSS_ENTROPY = {"policy": "cross_entropy", "kl": None}


def grpo(estimator: str, dual: float | None = None) -> dict:
    """Returns PPO's clipped loss with bounds 0.2 below and 0.28 above, and a KL penalty."""
    return {
        "policy": {"clip": {"low": 0.2, "high": 0.28, "dual": dual}},
        "kl": {"estimator": estimator, "coefficient": 0.1},
    }


def f32(value: float) -> float:
    """Rounds to f32, so that both sides start from the same bits."""
    return torch.tensor(value, dtype=torch.float32).item()


def paths(vocabulary: int, seed: int, longest: int) -> list[dict]:
    """Creates multi-turn sequences over a shared trunk.

    Sampled runs alternate with context tokens and are targets, also on shared prefixes. Two sequences differ only in
    their terms. One sequence is trained at another temperature.
    """
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(n)]

    trunk = ids(longest // 3)
    branch = trunk + ids(longest // 5)
    full = branch + ids(longest - len(branch))
    tokens = [full, branch + ids(longest // 4), trunk + ids(11), full, branch, ids(longest // 2)]
    out = []
    for number, path in enumerate(tokens):
        temperature = f32(0.7) if number == 1 else 1.0
        # Turns of seven tokens: three context tokens, four targets.
        targets = [
            {
                "index": index,
                "temperature": temperature,
                "term": {
                    "path": number,
                    "weight": f32(rng.uniform(0.5, 1.5) / 100),
                    "advantage": f32(rng.uniform(-2.0, 2.0)),
                    "behaviour": None,
                    "proximal": None,
                    "reference": None,
                    "version": 0,
                },
            }
            for index in range(1, len(path))
            if index % 7 >= 3
        ]
        out.append({"tokens": path, "targets": targets})
    return out


def logprobs(model, path: dict) -> torch.Tensor:
    """Computes the log-probability of every target of one sequence."""
    logits = model(torch.tensor([path["tokens"]]), use_cache=False).logits[0]
    index = torch.tensor([t["index"] for t in path["targets"]])
    temperature = torch.tensor([t["temperature"] for t in path["targets"]])
    picked = (logits[index - 1] / temperature[:, None]).log_softmax(-1)
    return picked.gather(1, torch.tensor(path["tokens"])[index][:, None])[:, 0]


def off_policy(model, batch: list[dict], loss: dict, seed: int) -> None:
    """Gives every term a behavior and a reference log-probability around the model's own.

    Some lie beyond the clip bounds, but none so close to a bound that rounding decides its side.
    """
    rng = random.Random(seed)
    clip = loss["policy"]["clip"]
    bounds = [1.0 - clip["low"], 1.0 + clip["high"]] + ([clip["dual"]] if clip["dual"] else [])
    for path in batch:
        with torch.no_grad():
            own = logprobs(model, path).tolist()
        for target, logp in zip(path["targets"], own, strict=True):
            ratio = bounds[0]
            while any(abs(ratio / bound - 1.0) < 0.01 for bound in bounds):
                shift = rng.gauss(0.0, 0.4)
                ratio = torch.tensor(shift).exp().item()
            target["term"]["behaviour"] = f32(logp - shift)
            target["term"]["reference"] = f32(logp + rng.gauss(0.0, 0.3))


def torch_loss(logp: torch.Tensor, terms: list[dict], loss: dict) -> torch.Tensor:
    """Returns weight × loss of every term of one sequence."""

    def column(name: str) -> torch.Tensor:
        return torch.tensor([term[name] for term in terms])

    if loss["policy"] == "cross_entropy":
        value = -logp
    else:
        clip, advantage = loss["policy"]["clip"], column("advantage")
        ratio = (logp - column("behaviour")).exp()
        clipped = ratio.clamp(1.0 - clip["low"], 1.0 + clip["high"])
        value = torch.maximum(-advantage * ratio, -advantage * clipped)
        if clip["dual"] is not None:
            capped = torch.minimum(value, -advantage * clip["dual"])
            value = torch.where(advantage < 0, capped, value)
    if loss["kl"] is not None:
        x = logp - column("reference")
        kl = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() + x - 1}[loss["kl"]["estimator"]]
        value = value + loss["kl"]["coefficient"] * kl
    return column("weight") * value


def backward(model, batch: list[dict], loss: dict) -> tuple[float, float]:
    """Adds the gradient of the loss over all sequences, each computed separately.

    Returns the loss, and the sum of the terms' absolute values. The latter is the scale for an error of the loss,
    since positive and negative terms may cancel.
    """
    total = magnitude = 0.0
    for path in batch:
        if path["targets"]:
            values = torch_loss(logprobs(model, path), [t["term"] for t in path["targets"]], loss)
            values.sum().backward()
            total += values.detach().double().sum().item()
            magnitude += values.detach().double().abs().sum().item()
    return total, magnitude
