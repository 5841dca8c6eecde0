"""Reads reinforcement learning steps from a run's store, `run.db`."""

import json
import sqlite3
import struct
import sys
from pathlib import Path


def words(kind: str, blob: bytes) -> list:
    return list(struct.unpack(f"<{len(blob) // 4}{kind}", blob))


def per_token(runs: bytes, count: int) -> list[float]:
    """Expands runs of (f32, u32 tokens) to `count` numbers, where 0 tokens means up to the end."""
    out: list[float] = []
    for value, length in struct.iter_unpack("<fI", runs):
        out += [value] * (length or count - len(out))
    return out


class Step:
    """A step of the last phase in a run's store."""

    def __init__(self, run: Path, number: int) -> None:
        db = sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True)
        (phase,) = db.execute("SELECT max(phase) FROM steps").fetchone()
        found = db.execute("SELECT plan FROM steps WHERE phase = ? AND step = ?", (phase, number)).fetchone()
        if found is None:
            sys.exit(f"{run} has no step {number} in phase {phase}")
        policies = json.loads(found[0])["policies"]
        if len(policies) != 1:
            sys.exit(f"step {number} trains {len(policies)} policies; one is compared")
        updates = len(policies[0]["updates"])
        if updates != 1:
            sys.exit(f"step {number} has {updates} updates; only the first would be on policy")
        rows = db.execute(
            "SELECT id, name, grp, sample, reward FROM attempts WHERE purpose = 'train' AND phase = ? AND step = ? "
            "AND status IN ('completed', 'failed') ORDER BY grp, sample",
            (phase, number),
        ).fetchall()
        self.attempts = {}
        names = {}
        for attempt, name, group, sample, reward in rows:
            names[name] = group, sample
            segments = db.execute(
                "SELECT kind, temperature, coalesce(s.tokens, p.tokens), logprobs FROM segments s "
                "LEFT JOIN prompts p ON p.id = s.prompt WHERE attempt = ? ORDER BY s.id",
                (attempt,),
            )
            tokens: list[int] = []
            sampled: list[tuple[int, float, float]] = []  # index, log-probability, temperature
            for kind, temperature, blob, logprobs in segments:
                ids = words("I", blob)
                if kind == "sampled":
                    sampled += [(len(tokens) + i, logp, temperature) for i, logp in enumerate(words("f", logprobs))]
                tokens += ids
            self.attempts[group, sample] = (tokens, sampled, reward)
        self.paths = [
            (names[name], weights, advantages)
            for name, weights, advantages in db.execute(
                "SELECT attempt, weight, advantage FROM planned_paths WHERE phase = ? AND step = ? ORDER BY place",
                (phase, number),
            )
        ]

    def batch(self) -> list[dict]:
        """Returns the step's batch as the learner sees it."""
        paths = []
        for key, *numbers in self.paths:
            tokens, sampled, _ = self.attempts[key]
            weights, advantages = (per_token(runs, len(sampled)) for runs in numbers)
            targets = [
                {
                    "index": place,
                    "temperature": temperature,
                    "term": {
                        "path": 0,
                        "weight": w,
                        "advantage": a,
                        "behaviour": logp,
                        "proximal": None,
                        "reference": None,
                        "version": 0,
                    },
                }
                for (place, logp, temperature), w, a in zip(sampled, weights, advantages, strict=True)
            ]
            paths.append({"tokens": tokens[: sampled[-1][0] + 1], "targets": targets})
        return paths
