"""Compares LoRA adapters with PEFT in f32: logits, gradients, and files in both directions.

Checks, for the given model and for every random-weight configuration, with an adapter that PEFT created and saved:

- Logits agree to 1e-3; gradients of A and B agree to 1e-4 per tensor, for cross-entropy and for PPO's clipped loss.
- After two steps of AdamW in Levade, PEFT loads Levade's adapter and returns Levade's logits. transformers does so with the
  adapter merged into the model.

The adapters vary in how they name modules (name suffixes, full names, a regular expression, all modules, some layers,
exclusions), in ranks and alphas of single modules, and in rank-stabilized scaling.

Not checked: dropout, and LoRA variants that Levade rejects (DoRA, biases).
"""

from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from common import Report, begin, parser, ragged, reference, relative, scratch, tensors
from models import all_models
from trees import CROSS_ENTROPY, backward, grpo, off_policy, paths

OPTIM = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "epsilon": 1e-8,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
}
KINDS = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
    {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.down_proj", "o_proj"], "use_rslora": True},
    {"target_modules": r"(?:model\.)?.*\.(?:self_attn|mlp)\.(?=[quv])\w+_proj", "alpha_pattern": {"up_proj": 3}},
    {"target_modules": "all-linear", "rank_pattern": {"^model.layers.0.mlp.down_proj": 2, "self_attn.*": 3}},
    {"target_modules": ["q_proj", "v_proj", "up_proj"], "layers_to_transform": [1], "exclude_modules": ["v_proj"]},
]


def adapted(path: Path, kind: dict):
    """Creates the model with a random, non-zero adapter."""
    torch.manual_seed(5)
    model = get_peft_model(reference(path), LoraConfig(r=5, lora_alpha=12, **kind))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.uniform_(parameter, -0.05, 0.05)
    return model.eval()


def logits_agree(report: Report, what: str, model, sequences: list[list[int]], ours: dict) -> None:
    worst = 0.0
    for i, ids in enumerate(sequences):
        with torch.no_grad():
            theirs = model(torch.tensor([ids]), use_cache=False).logits[0]
        worst = max(worst, (ours[f"logits.{i}"] - theirs).abs().max().item())
    report.check(what, worst, 1e-3)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    levade, report = begin(arguments)
    with scratch() as scratched:
        for number, (name, path) in enumerate(all_models(Path(scratched), arguments.only, arguments.model)):
            directory, out = Path(scratched) / f"adapter-{number}", Path(scratched) / "out"
            model = adapted(path, KINDS[number % len(KINDS)])
            model.save_pretrained(directory)
            sequences = ragged(model.config.vocab_size, seed=4, longest=60)
            levade.run("logits", path, out, sequences=sequences, adapter=str(directory))
            logits_agree(report, f"{name}: logits", model, sequences, tensors(out))

            for kind, loss in {"cross-entropy": CROSS_ENTROPY, "clip, k3": grpo("k3")}.items():
                batch = paths(model.config.vocab_size, seed=2, longest=150)
                if loss is not CROSS_ENTROPY:
                    off_policy(model, batch, loss, seed=3)
                model.zero_grad()
                theirs, magnitude = backward(model, batch, loss)
                ours = levade.run("gradients", path, out, batch=batch, loss=loss, adapter=str(directory))["loss"]
                report.check(f"{name}, {kind}: loss", abs(ours - theirs) / magnitude, 1e-5, f"{theirs:.6f}")
                found = tensors(out)
                wanted = {
                    n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.grad is not None
                }
                report.expect(f"{name}, {kind}: names", found.keys() == wanted.keys(), f"{len(wanted)} tensors")
                errors = {n: relative(found[n], wanted[n]) for n in found.keys() & wanted.keys()}
                worst = max(errors, key=errors.__getitem__)
                report.check(f"{name}, {kind}: gradients", errors[worst], 1e-4, f"worst {worst}")

            batch = paths(model.config.vocab_size, seed=6, longest=60)
            step = {"batches": [batch], "loss": CROSS_ENTROPY, "optim": OPTIM}
            levade.run("steps", path, out, steps=[step, step], adapter=str(directory))
            trained = Path(scratched) / f"trained-{number}"
            (out / "checkpoint").rename(trained)
            levade.run("logits", path, out, sequences=sequences, adapter=str(trained))
            loaded = PeftModel.from_pretrained(reference(path), trained).eval()
            logits_agree(report, f"{name}: saved, loaded by PEFT", loaded, sequences, tensors(out))
            merged = Path(scratched) / f"merged-{number}"
            (out / "merged").rename(merged)
            logits_agree(report, f"{name}: merged, in transformers", reference(merged), sequences, tensors(out))
    report.finish()


if __name__ == "__main__":
    main()
