"""Recipes of terms.py: every algorithm, loss and KL estimator, and variants that make a step's sum more complex."""

from bits_recipes import LONG, ROWS, SUMMARISE, THRICE, context, recipe
from bits_recipes import RECIPES as CALLERS

# A learning rate at which the second epoch is off-policy enough to clip.
FAST = "learning_rate = 5e-3\n"
AGAIN = f"steps = 3\nmini_batches = 2\nepochs = 2\n{FAST}"
STALE = f"steps = 5\nstaleness = 2\nmini_batches = 2\n{FAST}"

ALGORITHMS = [
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "remax",
    "gpg",
    "pass_k",
    "gspo",
    "gmpo",
    "cispo",
    "sapo",
    "minirl",
    "ppo",
]
CLIP = "low = 0.1, high = 0.1"
LOSSES = {
    "cross_entropy": '"cross_entropy"',
    "reinforce": '"reinforce"',
    "importance_sampling": '"importance_sampling"',
    "clip": f'{{kind = "clip", {CLIP}}}',
    "clip-dual": f'{{kind = "clip", {CLIP}, dual = 1.05}}',
    "clip-trust": f'{{kind = "clip", {CLIP}, trust = {{cap = 2.0, age_decay = 0.5}}}}',
    "clip-keep": f'{{kind = "clip", {CLIP}, keep = {{below = 0.5, above = 0.25}}}}',
    "clip-keep-value": f'{{kind = "clip", {CLIP}, keep = {{below = 0.5, above = 0.25, in_value_only = true}}}}',
    "mini_rl": f'{{kind = "mini_rl", {CLIP}, trust = {{cap = 1.5}}}}',
    "cispo": f'{{kind = "cispo", {CLIP}}}',
    "gspo": f'{{kind = "gspo", {CLIP}}}',
    "geometric_mean": f'{{kind = "geometric_mean", {CLIP}}}',
    "soft_gate": '{kind = "soft_gate", positive = 1.0, negative = 1.05}',
    "direct": '{kind = "direct", beta = 0.5}',
    "divergence-tv": '{kind = "divergence", measure = "total_variation", below = 0.02, above = 0.02, cap = 1.1}',
    "divergence-kl": '{kind = "divergence", measure = "kl", below = 0.01, above = 0.01, cap = 1.1}',
    "kl_cov": '{kind = "kl_cov", coefficient = 0.5, fraction = 0.1}',
    "clip_cov": f'{{kind = "clip_cov", {CLIP}, fraction = 0.2, lower = 0.0, upper = 50.0}}',
}
ESTIMATORS = ["k1", "k2", "k3", "absolute", "k1_with_k2_gradient", "k3_with_k2_gradient"]

# Model callers whose steps have different shapes: several policies and agents, trees with forks, teachers.
SELECTED = [
    "two-policies",
    "forking-program",
    "sub-agent",
    "teacher",
    "summaries",
    "summaries-program",
    "drop-oldest-program",
    "ppo",
    "environment",
    "external-opponent",
    "stale",
]


def algorithm(name: str) -> str:
    """Returns a recipe of an algorithm."""
    # The toy's own scorer gives a different reward for each turn, as per-turn advantages require.
    critic = "critic = {learning_rate = 1e-3, warmup = 1}\n" if name == "ppo" else ""
    k = "k = 2\n" if name == "pass_k" else ""
    return recipe(rl=f'algorithm = "{name}"\n{critic}{k}{AGAIN}')


def penalty(estimator: str) -> str:
    """Returns a recipe with a KL penalty in the loss. Weights it if the estimator would otherwise contribute no value."""
    weighted = ", importance_weighted = true" if estimator != "k2" else ""
    kl = f'kl = {{estimator = "{estimator}", coefficient = 0.05, reference_every = 2{weighted}}}\n'
    return recipe(rl=f"{kl}{AGAIN}entropy = 0.01\n")


def short(name: str) -> str:
    """Returns a recipe of bits_recipes.py with fewer epochs on demonstrations."""
    return CALLERS[name].replace("epochs = 20", "epochs = 5")


RECIPES = (
    {f"algorithm {name}": algorithm(name) for name in ALGORITHMS}
    | {f"loss {name}": recipe(rl=f"loss = {loss}\n{AGAIN}") for name, loss in LOSSES.items()}
    | {f"penalty {estimator}": penalty(estimator) for estimator in ESTIMATORS}
    | {
        "penalty in the reward": recipe(
            rl='kl = {estimator = "k1", coefficient = 0.05, apply_to = "reward", '
            f"adaptive = {{target = 0.1, horizon = 100}}}}\n{AGAIN}"
        ),
        "stale": recipe(rl=STALE),
        "stale, recomputed": recipe(
            rl=f'{STALE}proximal = "recompute"\ncorrection = {{level = "token", '
            'bound = {kind = "mask", low = 0.9, high = 1.1}, normalise = true}\n'
        ),
        "stale, rejected": recipe(
            rl=f'{STALE}proximal = "recompute"\nrejection = [{{statistic = "ratio", low = 0.95, high = 1.05}}]\n'
            "entropy = 0.02\n"
        ),
        "stale, guessed": recipe(rl=f'{STALE}proximal = "interpolate"\n'),
        "stale, trust": recipe(rl=f"{STALE}loss = {LOSSES['clip-trust']}\n"),
        "high entropy": recipe(rl=f"{AGAIN}high_entropy_fraction = 0.3\nmax_trained_turns = 1\n"),
        "micro-batches": recipe(rl=f"{AGAIN}groups = 4\n").replace(
            "micro_batch_tokens = 600", "micro_batch_tokens = 1"
        ),
        "one micro-batch": recipe(rl=f"{AGAIN}groups = 4\n").replace("tokens = 600", "tokens = 100000"),
        "adapters": recipe(
            model='model = {source = "./model", lora = {rank = 4}}\n',
            rl=f'{STALE}kl = {{estimator = "k3", coefficient = 0.05}}\nentropy = 0.01\n',
        ),
        "imitation": recipe(LONG + SUMMARISE, AGAIN, tasks=ROWS, sft=THRICE.replace("20", "4")),
        "dropped context": recipe(LONG + context("drop_oldest"), AGAIN, tasks=ROWS, sft=THRICE.replace("20", "4")),
    }
    | {f"caller {name}": short(name) for name in SELECTED}
)
