"""Micro-batch plans: splits an update into micro-batches, and follows a recorded plan (`Cut` of the crate
`levade-policy`).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .errors import VerbError, invalid_request
from .merge import count_shared_tokens


@dataclass(frozen=True)
class MicroBatch:
    """Sequences, by their indices in the update, that rank `rank` computes together. Empty if the rank only keeps in
    step.
    """

    rank: int
    paths: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatchPlan:
    """An update on `world_size` data-parallel ranks. Each rank runs its micro-batches in this order."""

    world_size: int
    micro_batches: tuple[MicroBatch, ...]

    @staticmethod
    def parse(found: Any) -> "MicroBatchPlan":
        """Parses a plan from JSON.

        Raises `invalid` if `found` is not a plan.
        """
        try:
            batches = tuple(MicroBatch(int(b["rank"]), tuple(map(int, b["paths"]))) for b in found["micro_batches"])
            return MicroBatchPlan(int(found["world_size"]), batches)
        except (TypeError, KeyError, ValueError) as error:
            raise invalid_request(
                f"the micro-batch plan `cut` must have `world_size` and `micro_batches` with `rank` and `paths`: {error!r}"
            ) from None

    def json(self) -> dict:
        """Returns the JSON form."""
        batches = [{"rank": b.rank, "paths": list(b.paths)} for b in self.micro_batches]
        return {"world_size": self.world_size, "micro_batches": batches}

    def check(self, paths: int, world_size: int) -> None:
        """Checks that `world_size` ranks can follow the plan for an update of `paths` sequences.

        Raises `cut` with the first difference.
        """
        if self.world_size != world_size:
            raise _plan_error(f"the micro-batch plan is for {self.world_size} ranks, but the group has {world_size}")
        seen = [False] * paths
        for i, batch in enumerate(self.micro_batches):
            if not 0 <= batch.rank < world_size:
                raise _plan_error(
                    f"micro-batch {i} of the plan is for rank {batch.rank}, but the ranks are 0 to {world_size - 1}"
                )
            for path in batch.paths:
                if not 0 <= path < paths:
                    raise _plan_error(f"micro-batch {i} of the plan has path {path}, but the update has {paths} paths")
                if seen[path]:
                    raise _plan_error(f"micro-batch {i} of the plan repeats path {path}")
                seen[path] = True
        if not all(seen):
            raise _plan_error(f"path {seen.index(False)} is missing from the micro-batch plan")

    def rounds(self) -> list[dict[int, int]]:
        """Returns the rounds of micro-batches that ranks run simultaneously.

        A round maps every rank with a remaining micro-batch to that micro-batch's index.
        """
        queues: dict[int, list[int]] = {}
        for i, batch in enumerate(self.micro_batches):
            queues.setdefault(batch.rank, []).append(i)
        longest = max(map(len, queues.values()), default=0)
        return [{rank: queue[n] for rank, queue in queues.items() if n < len(queue)} for n in range(longest)]


def _plan_error(why: str) -> VerbError:
    return VerbError("cut", why)


def count_merged_tokens(paths: list[np.ndarray]) -> int:
    """Returns the number of tokens after merging. In sorted order, a sequence adds what it does not share with the
    previous one.
    """
    ordered = sorted(paths, key=lambda tokens: tokens.astype(">u4").tobytes())
    total = sum(map(len, ordered))
    return total - sum(count_shared_tokens(a, b) for a, b in pairwise(ordered))


def fill_micro_batches(
    groups: list[list[np.ndarray]], max_tokens: int, target_tokens: int | None = None
) -> list[list[int]]:
    """Fills micro-batches with sequence indices, in order, up to `target_tokens` or at most `max_tokens` merged tokens.

    A group stays together if it has at most `max_tokens` merged tokens. Otherwise it is split between sequences. A sequence
    longer than `max_tokens` gets its own micro-batch.
    """
    target_tokens = max_tokens if target_tokens is None else target_tokens
    indices = iter(range(sum(map(len, groups))))
    pieces: list[list[tuple[int, np.ndarray]]] = []
    for group in groups:
        placed = [(next(indices), tokens) for tokens in group]
        pieces += [placed] if placed and count_merged_tokens(group) <= max_tokens else [[path] for path in placed]
    batches: list[list[tuple[int, np.ndarray]]] = []
    for piece in pieces:
        if batches and count_merged_tokens([tokens for _, tokens in batches[-1] + piece]) <= target_tokens:
            batches[-1] = batches[-1] + piece
        else:
            batches.append(piece)
    return [[index for index, _ in batch] for batch in batches]


def plan(groups: list[list[np.ndarray]], micro_batch_tokens: int, world_size: int) -> MicroBatchPlan:
    """Creates the micro-batch plan of an update on `world_size` ranks.

    Micro-batches are filled up to an equal fraction of the tokens, if that is less than `micro_batch_tokens`. Rounds
    contain micro-batches of similar size. In the last round, some ranks may have no micro-batch.
    """
    if world_size == 1:
        batches = fill_micro_batches(groups, micro_batch_tokens)
        return MicroBatchPlan(1, tuple(MicroBatch(0, tuple(batch)) for batch in batches))
    paths = [tokens for group in groups for tokens in group]
    target_tokens = -(-sum(count_merged_tokens(group) for group in groups) // world_size)
    batches = fill_micro_batches(groups, micro_batch_tokens, min(micro_batch_tokens, target_tokens))
    sizes = [count_merged_tokens([paths[p] for p in batch]) for batch in batches]
    order = sorted(range(len(batches)), key=lambda b: (-sizes[b], b))
    batches = [batches[b] for b in order]
    batches += [[] for _ in range(-len(batches) % world_size)]
    return MicroBatchPlan(world_size, tuple(MicroBatch(i % world_size, tuple(b)) for i, b in enumerate(batches)))


def distribute_runs(
    bounds: np.ndarray, above: np.ndarray, max_tokens: int, world_size: int
) -> list[list[tuple[int, int]]]:
    """Returns rounds of runs `start..end` of complete branches for the ranks, of about equal size.

    A run is computed together with the ancestor tokens of its first branch. `bounds` [branches + 1] and `above`
    [branches] are in tokens. Including ancestors, a run has at most `max_tokens` tokens unless a single sequence is longer.
    The last round may have fewer runs than ranks.
    """

    def runs(limit: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        started = 0
        for (start, end), before in zip(pairwise(bounds.tolist()), above.tolist(), strict=True):
            if found and end - started <= limit:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
                started = start - before
        return found

    # The smallest limit that needs no more rounds. A limit below the largest branch would save no time.
    slots = -(-len(runs(max_tokens)) // world_size) * world_size
    low, high = min(max_tokens, int((np.diff(bounds) + above).max(initial=1))) - 1, max_tokens
    while high - low > 1:
        limit = (low + high) // 2
        low, high = (low, limit) if len(runs(limit)) <= slots else (limit, high)
    dealt = runs(high)
    return [dealt[i : i + world_size] for i in range(0, len(dealt), world_size)]
