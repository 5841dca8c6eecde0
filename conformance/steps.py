"""Compares consecutive GRPO steps of a run with plain PyTorch on the same attempts.

Reads the steps of a run's last phase: samples and rewards. PyTorch starts with the same weights. For every step, it
computes advantages (reward minus the group's mean, divided by its deviation), the policy gradient averaged over
tokens, gradient norm clipping and AdamW on its own. Checks:

- Before each step, log-probabilities agree with those at sampling to 2e-3.
- After the last step, the weights of the run's checkpoint agree to 1e-2, relative to their movement. AdamW divides small
  gradients by themselves, so rounding alone moves some weights.

The run must use `algorithm = "grpo"` in f32, on policy (one update per step, `staleness = 0`), with a constant
learning rate, one turn per attempt, and a checkpoint after the last compared step. `--model` is the model with which
its phase started.

Not checked: sampling, clipping of the ratio (which is 1).
"""

import statistics
import sys
import tomllib
from pathlib import Path

import torch
from safetensors.torch import load_file

from common import Report, parser, reference, relative
from record import Step

# Levade's epsilon in the group's deviation.
EPSILON = 1e-6
# Number of attempts per forward pass.
TOGETHER = 16


def advantages(step: Step) -> dict[tuple[int, int], float]:
    """Returns every attempt's advantage within its group."""
    groups: dict[int, list[float]] = {}
    for (group, _), (_, _, reward) in step.attempts.items():
        groups.setdefault(group, []).append(reward)
    scale = {group: statistics.stdev(rewards) + EPSILON for group, rewards in groups.items()}
    return {
        key: (reward - statistics.mean(groups[key[0]])) / scale[key[0]] for key, (_, _, reward) in step.attempts.items()
    }


def accumulate(model: torch.nn.Module, step: Step) -> float:
    """Adds the gradient of a step. Returns the largest difference between a log-probability and the recorded one."""
    worth = advantages(step)
    tokens_of_step = sum(len(sampled) for _, sampled, _ in step.attempts.values())
    keys, worst = sorted(step.attempts), 0.0
    for at in range(0, len(keys), TOGETHER):
        these = [(step.attempts[key], worth[key]) for key in keys[at : at + TOGETHER]]
        longest = max(len(tokens) for (tokens, _, _), _ in these)
        # Padding comes last, where no token sees it.
        ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for (tokens, _, _), _ in these])
        logits = model(ids).logits
        loss = torch.zeros(())
        for row, ((tokens, sampled, _), advantage) in zip(logits, these, strict=True):
            indices = torch.tensor([index for index, _, _ in sampled])
            temperature = sampled[0][2]
            logps = (
                (row[indices - 1] / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[indices, None])[:, 0]
            )
            recorded = torch.tensor([logp for _, logp, _ in sampled])
            worst = max(worst, (logps.detach() - recorded).abs().max().item())
            loss = loss - advantage * (logps - logps.detach()).exp().sum() / tokens_of_step
        loss.backward()
    return worst


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--run", type=Path, required=True, help="directory of a run")
    p.add_argument("--steps", type=int, default=10, help="number of steps from the first of the last phase")
    p.add_argument("--checkpoint", type=Path, required=True, help="checkpoint of the run after that many steps")
    arguments = p.parse_args()
    if arguments.model is None:
        sys.exit("--model is needed: the weights that drew the first step")
    torch.set_num_threads(arguments.threads)
    report = Report()
    phase = tomllib.loads((arguments.run / "recipe.toml").read_text())["phase"][-1]
    adam = phase["optimiser"]
    model = reference(arguments.model)
    started = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=phase["learning_rate"],
        betas=(adam["beta1"], adam["beta2"]),
        eps=adam["epsilon"],
        weight_decay=adam["weight_decay"],
    )
    for number in range(arguments.steps):
        step = Step(arguments.run, number)
        worst = accumulate(model, step)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), adam["max_grad_norm"])
        report.check(f"step {number}", worst, 2e-3, f"{len(step.attempts)} attempts, norm of the gradient {norm:.4f}")
        optimiser.step()
        optimiser.zero_grad()
    ended = load_file(arguments.checkpoint / "model.safetensors")
    ours = torch.cat([(ended[name].float() - started[name]).flatten() for name in ended])
    theirs = torch.cat([(model.state_dict()[name] - started[name]).flatten() for name in ended])
    report.check("how the weights have moved", relative(ours, theirs), 1e-2, f"by {theirs.norm():.4f} in all")
    report.finish()


if __name__ == "__main__":
    main()
