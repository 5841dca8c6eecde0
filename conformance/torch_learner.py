"""Compares the PyTorch learner (`python/levade_torch`) with plain transformers in one process, f32, sequence by
sequence.

Groups are real: torchrun starts them, and the checks call them over HTTP. Checks, on tiny models with random weights,
for each kind of parallelism:

- The log-probability of every target to 1e-4, with Σ p² and entropy.
- The gradient of every loss to 1e-5 of the gradient's norm (on FSDP2 of 2 ranks; only cross-entropy, GRPO, and PPO with a critic
  elsewhere).
- Weights after five steps of clipped AdamW to 1e-5 of the weights' norm, for updates with a micro-batch plan.

Autograd differentiates the reference losses (torch_losses.py). A gradient is read from the first moment after a step
with β₁ = 0 and a learning rate of 0, which changes nothing else. If two experts score equally, the sides may choose
differently; the seeds here contain no such token.

Not checked: CUDA (NCCL, FlexAttention, offloading), kills and resuming (torch_killed.py), checkpoints of pipelines
(torch_pipeline.py).
"""

import dataclasses
import math
import random
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from common import Report, parser, reference, scratch
from models import BASE, CASES, FAMILIES, FULL, SLIDING, Case, make
from torch_group import Forked, Group, Torchrun, batch_arrays, blocks, group_arrays, path_arrays
from torch_losses import CLIP, losses, term_losses
from trees import f32, paths

# Trees are small here, so small limits give several attention blocks in forked processes.
blocks.LEAST, blocks.MOST, blocks.ROWS = 2, 8, 4

EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
FAMILIES["qwen3_moe"] = (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 32, "decoder_sparse_step": 1})
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
MODELS = {
    "llama": Case("llama", "llama", EVEN),
    "qwen2": Case("qwen2", "qwen2", EVEN | {"tie_word_embeddings": True}),
    "qwen3": Case("qwen3", "qwen3", EVEN | {"head_dim": 32}),
    "qwen3_moe": Case("qwen3_moe", "qwen3_moe", EVEN | EXPERTS),
    "windows": next(case for case in CASES if case.name == "mistral-window"),
    "gemma3": Case("gemma3", "gemma3", {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 20}),
}
STEPS = 5
OPTIM = {
    "learning_rate": 1e-3,
    "beta1": 0.5,
    "beta2": 0.95,
    "epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": None,
}
OPTIM = {name: value and f32(value) for name, value in OPTIM.items()}
# The first moment is the gradient, and weights do not change.
STILL = OPTIM | {"learning_rate": 0.0, "beta1": 0.0}
IMITATION = {"policy": "cross_entropy"}
GRPO = {"policy": {"clip": CLIP}, "kl": {"estimator": "k3", "coefficient": 0.1}}
PPO = {"policy": {"clip": CLIP | {"dual": 1.5}}}
VALUE = {"policy": {"value": {"clip": f32(0.2)}}}


@dataclasses.dataclass
class Kind:
    """A kind of parallelism, with the models on which it is checked."""

    name: str
    processes: int
    models: tuple[str, ...]
    options: dict = dataclasses.field(default_factory=dict)
    every_loss: bool = False
    launcher: type = Forked
    # Bounds of gradients and weights, and of log-probabilities.
    bounds: tuple[float, float] = (1e-5, 1e-4)


FAMILIES_3 = ("llama", "qwen2", "qwen3")
# Bounds for bf16. Log-probabilities differ by up to 0.13 nats, which moves some terms across a clip bound, where the
# gradient ends.
COARSE = (0.3, 0.3)
KINDS = [
    Kind("fsdp 2", 2, ("llama",), every_loss=True),
    Kind("tp 2", 2, FAMILIES_3, {"tp": 2}),
    Kind("cp 2", 2, FAMILIES_3, {"cp": 2}),
    Kind("fsdp 2 × tp 2", 4, FAMILIES_3, {"tp": 2}),
    Kind("ep 2", 2, ("qwen3_moe",), {"ep": 2}),
    Kind("ep 2 = tp 2", 2, ("qwen3_moe",), {"ep": 2, "tp": 2}),
    Kind("pp 2", 2, FAMILIES_3, {"pp": 2}),
    Kind("pp 3, many micro-batches", 3, ("llama",), {"pp": 3, "tokens": 20, "head_rows": 7}),
    Kind("fsdp 2 × pp 2", 4, ("qwen2",), {"pp": 2}),
    Kind("tp 2 × pp 2", 4, ("qwen3",), {"tp": 2, "pp": 2}),
    Kind("cp 2 × pp 2", 4, ("llama",), {"cp": 2, "pp": 2}),
    Kind("pp 2, windows", 2, ("windows", "gemma3"), {"pp": 2}),
    Kind("pp 2, checkpointed, offloaded", 2, ("qwen3",), {"pp": 2, "checkpoint-activations": True, "offload": True}),
    Kind("pp 2, adapter", 2, ("qwen2",), {"pp": 2, "lora_rank": 4, "lora_alpha": 8.0}),
    Kind("pp 2, bf16", 2, ("llama",), {"pp": 2, "dtype": "bf16"}, bounds=COARSE),
    Kind("pp 2, experts", 2, ("qwen3_moe",), {"pp": 2}),
    Kind("ep 2 × pp 2", 4, ("qwen3_moe",), {"ep": 2, "pp": 2}),
    Kind("fsdp 2, windows", 2, ("windows", "gemma3")),
    Kind(
        "fsdp 2, checkpointed, offloaded",
        2,
        ("qwen3",),
        {"checkpoint-activations": True, "offload": True, "head_rows": 7, "tokens": 40},
    ),
    Kind("fsdp 2, adapter", 2, ("qwen2",), {"lora_rank": 4, "lora_alpha": 8.0}),
    Kind("fsdp 2, bf16", 2, ("llama",), {"dtype": "bf16"}, bounds=COARSE),
    Kind("one process", 1, ("qwen2",), launcher=Torchrun),
]


class Plain:
    """A transformers model, with a value head if it is a critic."""

    def __init__(self, directory: Path, critic: bool) -> None:
        self.model = reference(directory)
        self.head = torch.nn.Linear(self.model.config.hidden_size, 1) if critic else None
        if critic:
            torch.nn.init.zeros_(self.head.weight)
            torch.nn.init.zeros_(self.head.bias)
        # A value has no gradient for the language model head, but AdamW decays that head.
        named = dict(self.model.named_parameters())
        if critic:
            named |= {f"value_head.{name}": p for name, p in self.head.named_parameters()}
        self.parameters = named

    def found(self, path: dict, temperature: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns log-probability (or value), entropy and Σ p² of the targets of one sequence."""
        index = torch.tensor([t["index"] for t in path["targets"]])
        tokens = torch.tensor(path["tokens"])
        if self.head is not None:
            states = self.model.model(tokens[None], use_cache=False).last_hidden_state[0]
            value = self.head(states[index - 1])[:, 0]
            return value, torch.zeros_like(value), torch.zeros_like(value)
        logits = self.model(tokens[None], use_cache=False).logits[0][index - 1]
        logits = logits / torch.tensor([t["temperature"] for t in path["targets"]])[:, None]
        logp = logits.log_softmax(-1)
        p = logp.exp()
        return logp.gather(1, tokens[index][:, None])[:, 0], -(p * logp).sum(-1), (p * p).sum(-1)

    def backward(self, batch: list[dict], loss: dict) -> tuple[float, float]:
        """Adds the gradient of a loss over sequences. Returns the loss, and the sum of the terms' magnitudes."""
        total = magnitude = 0.0
        for path in (path for path in batch if path["targets"]):
            logp, entropy, _ = self.found(path)
            t = columns([target["term"] for target in path["targets"]])
            if self.head is not None:
                free, near = (
                    logp - t["returns"],
                    logp.clamp(t["value"] - VALUE_CLIP, t["value"] + VALUE_CLIP) - t["returns"],
                )
                correction = torch.where(t["correction"].isnan(), 1.0, t["correction"])
                found = t["weight"] * correction * 0.5 * torch.maximum(free**2, near**2)
            else:
                found = term_losses(loss, logp.double(), entropy.double(), t)
            found.sum().backward()
            total += found.detach().sum().item()
            magnitude += found.detach().abs().sum().item()
        return total, magnitude


VALUE_CLIP = VALUE["policy"]["value"]["clip"]


def columns(terms: list[dict]) -> dict[str, torch.Tensor]:
    """Returns terms as f64 columns, with NaN for absent numbers."""
    names = (
        "weight",
        "advantage",
        "returns",
        "value",
        "behaviour",
        "proximal",
        "reference",
        "path_log_ratio",
        "correction",
        "age",
    )
    found = {n: torch.tensor([math.nan if t.get(n) is None else t[n] for t in terms]).double() for n in names}
    return found | {"marked": torch.tensor([t["marked"] for t in terms])}


def fill_terms(plain: Plain, batch: list[dict], seed: int) -> list[dict]:
    """Gives every term all numbers that a loss may need, around the model's own log-probabilities.

    The numbers lie within and beyond all bounds, but not on a bound.
    """
    rng = random.Random(seed)
    bounds = [
        1 - CLIP["low"],
        1 + CLIP["high"],
        1.5,
        0.7,
        2.0,
        0.5,
        *(1 - 0.2 * 2.0 * math.exp(-0.1 * a) for a in range(4)),
    ]
    bounds += [1 + 0.28 * 2.0 * math.exp(-0.1 * a) for a in range(4)]

    def off() -> float:
        while any(abs(math.exp(shift := rng.gauss(0.0, 0.4)) / bound - 1) < 0.01 for bound in bounds):
            pass
        return shift

    for path in batch:
        with torch.no_grad():
            own = plain.found(path)[0].tolist() if path["targets"] else []
        for target, logp in zip(path["targets"], own, strict=True):
            target["term"] |= {
                "behaviour": f32(logp - off()),
                "proximal": f32(logp - off()) if rng.random() < 0.5 else None,
                "reference": f32(logp - rng.gauss(0.0, 0.3)),
                "path_log_ratio": f32(off()),
                "marked": rng.random() < 0.5,
                "correction": f32(rng.uniform(0.5, 1.5)) if rng.random() < 0.5 else None,
                "age": rng.randrange(4),
                "returns": f32(logp + rng.gauss(0.0, 1.0)),
                "value": f32(logp + rng.gauss(0.0, 0.3)),
            }
    return batch


def norm(tensors) -> float:
    """Returns the norm of all tensors together, in f64."""
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def distance(ours: dict, theirs: dict) -> float:
    """Returns ||a − b|| / ||b|| of all tensors together; infinite if a tensor is missing."""
    if ours.keys() != theirs.keys():
        print("     ", sorted(ours.keys() ^ theirs.keys())[:6])
        return math.inf
    return norm([ours[n].double() - theirs[n].double() for n in theirs]) / norm(theirs.values())


class Check:
    """Checks on one group."""

    def __init__(self, report: Report, group: Group, name: str, directory: Path, bounds: tuple[float, float]) -> None:
        self.report, self.group, self.name, self.folder = report, group, name, directory
        self.bound, self.logp_bound = bounds
        self.saved = group.root / "saved"
        self.saved.mkdir(exist_ok=True)
        self.plain = {learner: Plain(directory, critic=learner == "critic") for learner in ("policy", "critic")}

    def start(self, learner: str) -> Plain:
        """Resets both sides to the initial weights, with fresh optimizers."""
        initial = self.group.root / "initial" / learner
        if not initial.exists():
            initial.mkdir(parents=True)
            self.group.call(learner, "save", {"folder": str(initial), "with_optimiser": False})
        self.group.call(learner, "load", {"folder": str(initial), "with_optimiser": False})
        return Plain(self.folder, critic=learner == "critic")

    def tensors(self, learner: str, moments: bool) -> dict[str, torch.Tensor]:
        """Returns tensors that the learner saves: weights or first moments, including the value head's."""
        for old in self.saved.iterdir():
            old.unlink()
        self.group.call(learner, "save", {"folder": str(self.saved), "with_optimiser": moments})
        names = ["optimiser.first", "value_head.first"] if moments else ["model", "value_head"]
        found = {}
        for name in names:
            if (path := self.saved / f"{name}.safetensors").exists():
                found |= load_file(path)
        return found

    def predictions(self, batch: list[dict]) -> None:
        """Compares log-probabilities, entropies and Σ p² of one call with those of each sequence."""
        plain = self.plain["policy"]
        arrays = batch_arrays(batch)
        _, found = self.group.call("policy", "predictions", {}, arrays)
        _, alone = self.group.call("policy", "logprobs", {}, arrays)
        ours = {k: [] for k in ("logprobs", "entropies", "concentrations")}
        theirs = {k: [] for k in ours}
        target_of = {}
        for at, (first, count) in enumerate(zip(arrays["first_term"], arrays["terms"], strict=True)):
            target_of |= {first + i: at for i in range(count)}
        order = {}
        for term, path in enumerate(arrays["path"].tolist()):
            order.setdefault(path, []).append(target_of[term])
        with torch.no_grad():
            for number, path in enumerate(batch):
                for (name, column), value in zip(theirs.items(), plain.found(path), strict=True):
                    column.append(value)
                    ours[name].append(torch.from_numpy(found[name][order[number]]))
        for name in ours:
            worst = (torch.cat(ours[name]) - torch.cat(theirs[name])).abs().max().item()
            self.report.check(f"{self.name}: {name}", worst, self.logp_bound, f"{len(found[name])} targets")
        self.report.expect(f"{self.name}: logprobs of both verbs", (alone["logprobs"] == found["logprobs"]).all())

    def gradient(self, learner: str, what: str, loss: dict, batch: list[dict]) -> None:
        """Compares one gradient, through `forward_backward` and `optim_step`."""
        plain = self.plain[learner]
        for parameter in plain.parameters.values():
            parameter.grad = None
        total, magnitude = plain.backward(batch, loss)
        answer, _ = self.group.call(learner, "forward_backward", {"loss": loss}, batch_arrays(batch))
        step, _ = self.group.call(learner, "optim_step", {"params": STILL})
        found = self.tensors(learner, moments=True)
        wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.parameters.items()}
        wanted = stacked(wanted, found)
        error = abs(answer["sums"]["loss"] - total) / magnitude
        self.report.check(f"{self.name}: {what}: loss", error, self.bound, f"{total:.6f}")
        size = norm(wanted.values())
        self.report.check(f"{self.name}: {what}: gradient", distance(found, wanted), self.bound, f"norm {size:.4f}")
        self.report.check(f"{self.name}: {what}: gradient norm", abs(step["step"]["grad_norm"] / size - 1), self.bound)

    def steps(self, learner: str, what: str, loss: dict) -> None:
        """Compares five updates with the group's micro-batch plans. Every other step is clipped to half its norm."""
        plain = self.start(learner)
        matrices = [p for p in plain.parameters.values() if p.ndim >= 2]
        others = [p for p in plain.parameters.values() if p.ndim < 2]
        adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": OPTIM["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            betas=(OPTIM["beta1"], OPTIM["beta2"]),
            eps=OPTIM["epsilon"],
        )
        norms = 0.0
        for number in range(STEPS):
            batch = fill_terms(plain, paths(BASE["vocab_size"], 20 + number, longest=60), 70 + number)
            for p in plain.parameters.values():
                p.grad = torch.zeros_like(p)
            plain.backward(batch, loss)
            size = norm([p.grad for p in plain.parameters.values()])
            bound = f32(size * (0.5 if number % 2 == 0 else 10.0))
            torch.nn.utils.clip_grad_norm_(plain.parameters.values(), bound)
            rate = f32(1e-3 * (number + 1) / STEPS)
            for group in adamw.param_groups:
                group["lr"] = rate
            adamw.step()
            groups = [batch[:2], batch[2:]]
            cut = self.group.call(learner, "plan", {"micro_batch_tokens": 64}, group_arrays(groups))[0]["cut"]
            params = OPTIM | {"learning_rate": rate, "max_grad_norm": bound}
            answer, _ = self.group.call(
                learner, "train", {"loss": loss, "params": params, "cut": cut}, path_arrays(batch)
            )
            norms = max(norms, abs(answer["step"]["grad_norm"] / size - 1))
        ours = self.tensors(learner, moments=False)
        theirs = {n: p.detach() for n, p in plain.parameters.items()}
        theirs = unstacked(theirs, ours)
        self.report.check(f"{self.name}: {what}: gradient norms of {STEPS} steps", norms, 10 * self.bound)
        self.report.check(f"{self.name}: {what}: weights after {STEPS} steps", distance(ours, theirs), self.bound)


def adapter(check: Check, made: Path, batch: list[dict]) -> None:
    """Compares an adapter after one training step with PEFT on the files that it saves."""
    from peft import PeftModel

    group = check.group
    group.call("policy", "forward_backward", {"loss": IMITATION}, batch_arrays(batch))
    group.call("policy", "optim_step", {"params": OPTIM | {"learning_rate": 0.01}})
    check.tensors("policy", moments=True)
    plain = check.plain["policy"]
    plain.model = PeftModel.from_pretrained(reference(made), check.saved, is_trainable=True)
    named = {name.replace(".default.", "."): p for name, p in plain.model.named_parameters()}
    plain.parameters = {name: p for name, p in named.items() if ".lora_" in name}
    moved = norm([p for name, p in plain.parameters.items() if "lora_B" in name])
    check.report.expect(f"{check.name}: training changed the adapter", moved > 0.0, f"B has the norm {moved:.3g}")
    check.predictions(batch)
    check.gradient("policy", "GRPO", GRPO, batch)
    group.call("policy", "load", {"folder": str(check.saved), "with_optimiser": True})
    check.predictions(batch)
    weights = group.call("policy", "publish", {"version": 1})[0]["weights"]["at"]["manifest"]
    check.report.expect(f"{check.name}: publishes an adapter", "adapter" in weights["content"])


def stacked(theirs: dict, ours: dict) -> dict:
    """Renames tensors as the learner stores moments: with transformers' parameter names, tied parameters once."""
    return {n: t for n, t in theirs.items() if n in ours} if ours.keys() < theirs.keys() else theirs


def unstacked(theirs: dict, ours: dict) -> dict:
    """Renames weights as in files: one tensor per expert."""
    found = {}
    for name, tensor in theirs.items():
        if ".experts." not in name or name in ours:
            found[name] = tensor
            continue
        base = name.rpartition(".")[0]
        for expert, matrix in enumerate(tensor):
            parts = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{base}.{expert}.{part}.weight"] = piece
    return found


def run(report: Report, kind: Kind, model: str, directory: Path) -> None:
    """Runs all checks of a kind of group on one model."""
    made = make(MODELS[model], directory)
    name = f"{kind.name}, {model}"
    options = {"model": made, "critic": made} | kind.options
    with Group(kind.processes, directory / f"{kind.name} {model}", kind.launcher, **options) as group:
        check = Check(report, group, name, made, kind.bounds)
        batch = fill_terms(check.plain["policy"], paths(BASE["vocab_size"], 2, longest=60), 3)
        check.predictions(batch)
        if "lora_rank" in kind.options:
            return adapter(check, made, batch)
        chosen = losses() if kind.every_loss else {"imitation": IMITATION, "GRPO": GRPO, "PPO": PPO}
        for what, loss in chosen.items():
            check.gradient("policy", what, loss, batch)
        values = fill_terms(check.plain["critic"], paths(BASE["vocab_size"], 4, longest=60), 5)
        check.gradient("critic", "PPO's critic", VALUE, values)
        for what, loss in (("imitation", IMITATION), ("GRPO", GRPO), ("PPO", PPO)):
            check.steps("policy", what, loss)
        check.steps("critic", "PPO's critic", VALUE)


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--kind", default="", help="kind of group with this name, or else all kinds whose names contain it")
    arguments = p.parse_args()
    torch.set_num_threads(1)
    report = Report()
    with scratch() as directory:
        exactly = [kind for kind in KINDS if kind.name == arguments.kind]
        for kind in exactly or [kind for kind in KINDS if arguments.kind in kind.name]:
            for model in (model for model in kind.models if arguments.only in model):
                run(report, kind, model, Path(directory))
    report.finish()


if __name__ == "__main__":
    sys.exit(main())
