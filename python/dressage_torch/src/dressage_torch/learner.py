"""A learner on one rank: the arithmetic of the verbs. Every method but `plan` is called on all ranks at once, with equal arguments.

Micro-batches run in rounds, one for each of the ranks that take them; who has none left runs a token that is not trained, so that
all ranks meet in the same collectives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import head, lora
from .batch import TreeBatch, no_integers
from .cut import Cut, deal
from .errors import VerbError
from .head import Rows
from .layout import Layout
from .losses import Loss
from .merge import Paths, merge
from .mesh import Ranks
from .optimiser import Optimiser, Params
from .sums import Sums

NOTHING = TreeBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
# Told how many micro-batches are done, and of how many.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Limits:
    """How much is worked on at a time: rows of the head with logits, and packed tokens of a batch that came without a cut."""

    head_rows: int
    tokens: int


class Learner:
    """A model, what is trained of it, and its optimiser."""

    def __init__(
        self,
        model,
        trained: dict,
        ranks: Ranks,
        control: dist.ProcessGroup,
        limits: Limits,
        flexible: bool,
        progress: Progress,
    ) -> None:
        self.model, self.ranks, self.control, self.limits, self.flexible = model, ranks, control, limits, flexible
        self.optimiser = Optimiser(trained, ranks.shape.world) if trained else None
        self.progress = progress

    @property
    def has_value_head(self) -> bool:
        """Whether it is a critic."""
        return self.model.has_value_head

    def weights(self) -> list[Tensor]:
        """Everything that a forward pass reads: parameters and buffers, of which this rank may have a part."""
        return [*self.model.parameters(), *self.model.buffers()]

    def state(self) -> list[Tensor]:
        """Everything that only learning needs: accumulated gradients, and the optimiser's moments."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.optimiser is None:
            return gradients
        return [*gradients, *self.optimiser.first.values(), *self.optimiser.second.values()]

    def _layout(self, batch: TreeBatch | None) -> tuple[TreeBatch, Layout, Rows]:
        batch = NOTHING if batch is None or not len(batch.tokens) else batch
        layout = Layout.of(batch, self.ranks.context, self.ranks.device, self.flexible)
        return batch, layout, Rows.of(batch, layout)

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, batch: TreeBatch, kind: str) -> dict[str, np.ndarray] | None:
        """Of every target, f32: `logprobs`, or `predictions` (logprobs, entropies, concentrations), or `values`. Rank 0 gets
        them, others None.
        """
        if kind == "values" and not self.has_value_head:
            raise VerbError(
                "no_value_head", "this learner has no value head; start the group with --critic and ask that"
            )
        rounds = deal(batch.roots(), self.limits.tokens, self.ranks.shape.data)
        found = []
        for number, runs in enumerate(rounds):
            part, places = None, no_integers()
            if self.ranks.data < len(runs):
                part, places = batch.take(*runs[self.ranks.data])
            part, layout, rows = self._layout(part)
            columns = self.model(layout, lambda model, hidden, rows=rows: self._columns(model, hidden, rows, kind))
            found.append((places[rows.place] if len(places) else places, [c.float().cpu().numpy() for c in columns]))
            self.progress(min((number + 1) * self.ranks.shape.data, sum(map(len, rounds))), sum(map(len, rounds)))
        self.model.reshard()
        names = {"logprobs": ["logprobs"], "values": ["values"]}.get(kind, ["logprobs", "entropies", "concentrations"])
        return self._assemble(found if self.ranks.reports else [], names, len(batch.target_token))

    def _columns(self, model, hidden, rows: Rows, kind: str) -> tuple:
        if kind == "values":
            return (head.values(model.value_head, hidden, rows),)
        found = head.predictions(model.get_output_embeddings(), hidden, rows, self.limits.head_rows, False)
        return (found.logprobs,) if kind == "logprobs" else (found.logprobs, found.entropies, found.concentrations)

    def _assemble(self, found: list, names: list[str], targets: int) -> dict[str, np.ndarray] | None:
        gathered = self._gather(found)
        if gathered is None:
            return None
        arrays = {name: np.zeros(targets, np.float32) for name in names}
        for places, columns in (part for parts in gathered for part in parts):
            for name, column in zip(names, columns, strict=True):
                arrays[name][places] = column
        return arrays

    def _gather(self, value) -> list | None:
        into = [None] * self.ranks.shape.world if self.ranks.rank == 0 else None
        dist.gather_object(value, into, dst=0, group=self.control)
        return into

    # Training.

    def check_trains(self, loss: Loss | None = None) -> None:
        """Raises where the learner is frozen, or has no value head for a loss of values."""
        if self.optimiser is None:
            raise VerbError("invalid", "this learner is frozen: it evaluates, and does not train")
        if loss is not None and loss.is_of_values and not self.has_value_head:
            raise VerbError(
                "no_value_head", "a loss of values needs a value head; start the group with --critic and train that"
            )

    def backward(self, batch: TreeBatch | None, loss: Loss) -> Sums:
        """Adds the gradient of this rank's part of a round."""
        batch, layout, rows = self._layout(batch)
        sums = Sums(tokens=len(batch.tokens) if self.ranks.context.rank == 0 and batch is not NOTHING else 0)
        terms, target = batch.terms[batch.term_index], batch.term_target
        # The place of every local target in the order of rows.
        place = np.full(len(batch.target_token), -1)
        place[rows.place] = np.arange(len(rows.place))
        mine = np.flatnonzero(place[target] >= 0)
        terms, target = terms[mine], torch.from_numpy(place[target[mine]])
        weight = torch.from_numpy(terms.weight.astype(np.float64))

        def of_values(model, hidden):
            return (head.values(model.value_head, hidden, rows),)

        def of_policy(model, hidden):
            found = head.predictions(
                model.get_output_embeddings(), hidden, rows, self.limits.head_rows, loss.entropy != 0.0
            )
            return found.logprobs, found.entropies

        found = self.model(layout, of_values if loss.is_of_values else of_policy)
        at = found[0].detach().cpu()
        evaluated = loss.evaluate(at[target], terms)
        slopes = torch.zeros(len(at), dtype=torch.float64).index_add_(0, target, weight * evaluated.slope)
        objective = (found[0] * slopes.to(found[0])).sum()
        sums.targets = len(rows.place)
        if loss.is_of_values:
            sums.add_values(terms, evaluated)
        else:
            entropy = found[1].detach().cpu()
            sums.add_terms(terms, at[target], entropy[target], evaluated)
            if loss.entropy != 0.0:
                bonus = torch.zeros(len(at), dtype=torch.float64).index_add_(0, target, weight * loss.entropy)
                objective = objective - (found[1] * bonus.to(found[1])).sum()
                sums.loss -= float((bonus * entropy.double()).sum())
        objective.backward()
        return sums

    def _collect(self, found: list[tuple[int, Sums]], count: int) -> list[Sums] | None:
        gathered = self._gather(found if self.ranks.reports else [])
        if gathered is None:
            return None
        total = [Sums() for _ in range(count)]
        for place, sums in (part for parts in gathered for part in parts):
            total[place].merge(sums)
        return total

    def forward_backward(self, batch: TreeBatch, loss: Loss) -> Sums | None:
        """Adds the gradient of the loss over a batch, whose trees are dealt to the ranks. Rank 0 gets the sums."""
        rounds = deal(batch.roots(), self.limits.tokens, self.ranks.shape.data)
        found = []
        for runs in rounds:
            part = batch.take(*runs[self.ranks.data])[0] if self.ranks.data < len(runs) else None
            found.append((0, self.backward(part, loss)))
        total = self._collect(found, 1)
        return total[0] if total else None

    def train(self, paths: Paths, cut: Cut, loss: Loss, params: Params) -> tuple[list[Sums] | None, dict]:
        """Runs an update as it is cut, and steps. Rank 0 gets the sums of its micro-batches."""
        found, done, count = [], 0, len(cut.micro_batches)
        for runs in cut.rounds():
            place = runs.get(self.ranks.data)
            chosen = cut.micro_batches[place].paths if place is not None else ()
            sums = self.backward(merge(paths, list(chosen)) if chosen else None, loss)
            if chosen:
                found.append((place, sums))
            done += len(runs)
            self.progress(done, count)
        return self._collect(found, count), self.step(params)

    def step(self, params: Params) -> dict:
        """One optimiser step over what has accumulated."""
        if hasattr(self.model, "dressage_lora"):
            lora.sum_gradients(self.model, self.ranks)
        return self.optimiser.step(params, self.control)
