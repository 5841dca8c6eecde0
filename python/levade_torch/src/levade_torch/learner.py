"""A learner on one rank, which implements the computation of the verbs.

All ranks call every method except `plan` at once, with equal arguments. Micro-batches run in rounds, one per
data-parallel rank. A rank without a micro-batch computes a token that is not trained, so that all ranks take part in
the same collectives. Every micro-batch goes through all pipeline stages (pipeline.py). Only the last stage has the
heads and produces results.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import head, lora
from .batch import TreeBatch, no_integers
from .errors import VerbError
from .head import Rows
from .layout import Layout
from .losses import Loss
from .merge import Paths, merge
from .mesh import Ranks
from .micro_batches import MicroBatchPlan, distribute_runs
from .optimizer import Optimizer, OptimizerParams
from .pipeline import FORWARD, order
from .sums import Sums

NOTHING = TreeBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
# Called with the number of completed micro-batches, and their total number.
Progress = Callable[[int, int], None]
# Creates this rank's part of a round, or returns None if the rank has no part.
Part = Callable[[], TreeBatch | None]


@dataclass(frozen=True)
class Limits:
    """Maximum number of head rows with logits at a time, and of packed tokens in a batch without a micro-batch plan."""

    head_rows: int
    tokens: int


class Learner:
    """A model, its trained parameters, and their optimizer."""

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
        self.optimizer = Optimizer(trained, ranks, model.tied_name) if trained else None
        self.progress = progress

    @property
    def has_value_head(self) -> bool:
        """Whether the learner is a critic."""
        return self.model.has_value_head

    def weights(self) -> list[Tensor]:
        """Returns all tensors that a forward pass reads: parameters and buffers, of which this rank may have a part."""
        return [*self.model.parameters(), *self.model.buffers()]

    def state(self) -> list[Tensor]:
        """Returns all tensors that only training needs: accumulated gradients, and the optimizer's moments."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.optimizer is None:
            return gradients
        return [*gradients, *self.optimizer.first.values(), *self.optimizer.second.values()]

    def _layout(self, batch: TreeBatch | None) -> tuple[TreeBatch, Layout, Rows]:
        batch = NOTHING if batch is None or not len(batch.tokens) else batch
        layout = Layout.of(batch, self.ranks.context, self.ranks.device, self.flexible)
        return batch, layout, Rows.of(batch, layout)

    def _deal(self, batch: TreeBatch) -> list[list[tuple[int, int]]]:
        bounds = batch.branches()
        # A token's position equals the number of its ancestor tokens.
        return distribute_runs(bounds, batch.position[bounds[:-1]], self.limits.tokens, self.ranks.shape.data)

    def through_stage(self, layout: Layout | None, rows: int, then) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Computes a micro-batch of `rows` rows on this stage, as `TreeModel.forward` does.

        Before the last stage, hidden states are sent to the next stage. Returns the hidden states from the previous
        stage, and the result of `then` on the last stage.
        """
        pipeline = self.ranks.pipeline
        given = pipeline.states(rows, self.model.config.hidden_size, self.model.precision.compute, self.ranks.device)
        if given is not None:
            given.requires_grad_(torch.is_grad_enabled())
        found = self.model(layout, then, given)
        if not pipeline.last:
            pipeline.hand_down(found[0])
        return given, found

    def pass_done(self) -> None:
        """Finishes passes without gradients: waits for all sent tensors, and reshards the weights."""
        self.ranks.pipeline.drain()
        self.model.reshard()

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, batch: TreeBatch, kind: str, whole: bool = False) -> dict[str, np.ndarray] | None:
        """Computes f32 columns for every target.

        `kind` is `logprobs`, `predictions` (logprobs, entropies, concentrations) or `values`. Rank 0 gets the columns;
        other ranks get None. If `whole` is set, one rank computes the batch in one pass.
        """
        if kind == "values" and not self.has_value_head:
            raise VerbError(
                "no_value_head", "this learner has no value head; start the group with --critic and ask that"
            )
        rounds = [[(0, len(batch.tokens))]] if whole else self._deal(batch)
        found = []
        for number, runs in enumerate(rounds):
            part, indices = None, no_integers()
            if self.ranks.data < len(runs):
                part, indices = batch.take(*runs[self.ranks.data])
            part, layout, rows = self._layout(part)
            _, columns = self.through_stage(layout, len(layout.tokens), partial(self._columns, rows=rows, kind=kind))
            if self.ranks.reports:
                mine = indices[rows.place] if len(indices) else indices
                found.append((mine, [c.float().cpu().numpy() for c in columns]))
            self.progress(min((number + 1) * self.ranks.shape.data, sum(map(len, rounds))), sum(map(len, rounds)))
        self.pass_done()
        names = {"logprobs": ["logprobs"], "values": ["values"]}.get(kind, ["logprobs", "entropies", "concentrations"])
        return self._assemble(found, names, len(batch.target_token))

    def _columns(self, model, hidden, rows: Rows, kind: str) -> tuple:
        if not self.ranks.pipeline.last:
            return (hidden,)
        if kind == "values":
            return (head.values(model.value_head, hidden, rows),)
        found = head.predictions(model.get_output_embeddings(), hidden, rows, self.limits.head_rows, False)
        return (found.logprobs,) if kind == "logprobs" else (found.logprobs, found.entropies, found.concentrations)

    def _assemble(self, found: list, names: list[str], targets: int) -> dict[str, np.ndarray] | None:
        gathered = self._gather(found)
        if gathered is None:
            return None
        arrays = {name: np.zeros(targets, np.float32) for name in names}
        for indices, columns in (part for parts in gathered for part in parts):
            for name, column in zip(names, columns, strict=True):
                arrays[name][indices] = column
        return arrays

    def _gather(self, value) -> list | None:
        into = [None] * self.ranks.shape.world if self.ranks.rank == 0 else None
        dist.gather_object(value, into, dst=0, group=self.control)
        return into

    # Training.

    def check_trains(self, loss: Loss | None = None) -> None:
        """Raises `invalid` if the learner is frozen, and `no_value_head` if a value loss needs a missing value head."""
        if self.optimizer is None:
            raise VerbError("invalid", "this learner is frozen: it evaluates, and does not train")
        if loss is not None and loss.is_of_values and not self.has_value_head:
            raise VerbError(
                "no_value_head", "a loss of values needs a value head; start the group with --critic and train that"
            )

    def _objective(self, batch: TreeBatch | None, loss: Loss) -> tuple[Tensor | None, Tensor, Sums]:
        """Runs the forward pass of a micro-batch on this stage.

        Returns the received hidden states; the sent hidden states, or on the last stage the objective; and sums.
        """
        batch, layout, rows = self._layout(batch)
        sums = Sums(tokens=len(batch.tokens) if self.ranks.context.rank == 0 and batch is not NOTHING else 0)

        def then(model, hidden):
            if not self.ranks.pipeline.last:
                return (hidden,)
            if loss.is_of_values:
                return (head.values(model.value_head, hidden, rows),)
            moves = loss.entropy != 0.0
            found = head.predictions(model.get_output_embeddings(), hidden, rows, self.limits.head_rows, moves)
            return found.logprobs, found.entropies

        given, found = self.through_stage(layout, len(layout.tokens), then)
        if not self.ranks.pipeline.last:
            return given, found[0], sums
        return given, _weighed(found, batch, rows, loss, sums), sums

    def backward(self, parts: Sequence[Part], loss: Loss, tell: Callable[[int], None] = lambda _: None) -> list[Sums]:
        """Adds the gradient of this rank's parts of all rounds, and calls `tell` after each round.

        A part is created when its turn comes. Returns the sums of the parts, which are complete on the last stage.
        """
        pipeline, sums = self.ranks.pipeline, []
        # Micro-batches between their forward and backward pass: received hidden states, and their output.
        under_way: dict[int, tuple[Tensor | None, Tensor]] = {}
        for what, number in order(len(parts), pipeline.size, pipeline.stage):
            if what == FORWARD:
                given, out, found = self._objective(parts[number](), loss)
                under_way[number] = given, out
                sums.append(found)
                continue
            given, out = under_way.pop(number)
            gradient = pipeline.gradient(out)
            # If an adapter starts in a later stage, this stage has nothing to train.
            if out.requires_grad:
                out.backward(gradient)
            if given is not None:
                pipeline.hand_up(given.grad)
            tell(number)
        pipeline.drain()
        return sums

    def _collect(self, found: list[tuple[int, Sums]], count: int) -> list[Sums] | None:
        gathered = self._gather(found if self.ranks.reports else [])
        if gathered is None:
            return None
        total = [Sums() for _ in range(count)]
        for index, sums in (part for parts in gathered for part in parts):
            total[index].merge(sums)
        return total

    def forward_backward(self, batch: TreeBatch, loss: Loss) -> Sums | None:
        """Adds the gradient of the loss over a batch, whose branches are distributed to the ranks.

        Rank 0 gets the sums. Tokens count once for every rank that computes them.
        """
        rounds = self._deal(batch)

        def part(runs: list) -> TreeBatch | None:
            return batch.take(*runs[self.ranks.data])[0] if self.ranks.data < len(runs) else None

        found = self.backward([partial(part, runs) for runs in rounds], loss)
        total = self._collect([(0, sums) for sums in found], 1)
        return total[0] if total else None

    def train(
        self, paths: Paths, batch_plan: MicroBatchPlan, loss: Loss, params: OptimizerParams
    ) -> tuple[list[Sums] | None, dict]:
        """Runs an update according to its micro-batch plan, and steps. Rank 0 gets the sums per micro-batch."""
        rounds, count = batch_plan.rounds(), len(batch_plan.micro_batches)
        indices = [runs.get(self.ranks.data) for runs in rounds]
        done = list(accumulate(map(len, rounds)))

        def part(index: int | None) -> TreeBatch | None:
            chosen = batch_plan.micro_batches[index].paths if index is not None else ()
            return merge(paths, list(chosen)) if chosen else None

        found = self.backward(
            [partial(part, index) for index in indices], loss, lambda number: self.progress(done[number], count)
        )
        mine = [(index, sums) for index, sums in zip(indices, found, strict=True) if index is not None]
        return self._collect(mine, count), self.step(params)

    def step(self, params: OptimizerParams) -> dict:
        """Takes one optimizer step with the accumulated gradients."""
        if hasattr(self.model, "levade_lora"):
            lora.sum_gradients(self.model, self.ranks)
        return self.optimizer.step(params, self.control)


def _weighed(found: tuple[Tensor, ...], batch: TreeBatch, rows: Rows, loss: Loss, sums: Sums) -> Tensor:
    """Computes the objective of a micro-batch, and adds to the sums.

    `found` contains the values of the targets, or their log-probabilities and entropies.
    """
    terms, target = batch.terms[batch.term_index], batch.term_target
    # The index of every local target in the order of rows.
    row_of_target = np.full(len(batch.target_token), -1)
    row_of_target[rows.place] = np.arange(len(rows.place))
    mine = np.flatnonzero(row_of_target[target] >= 0)
    terms, target = terms[mine], torch.from_numpy(row_of_target[target[mine]])
    weight = torch.from_numpy(terms.weight.astype(np.float64))
    at = found[0].detach().cpu()
    evaluated = loss.evaluate(at[target], terms)
    slopes = torch.zeros(len(at), dtype=torch.float64).index_add_(0, target, weight * evaluated.slope)
    objective = (found[0] * slopes.to(found[0])).sum()
    sums.targets = len(rows.place)
    if loss.is_of_values:
        sums.add_values(terms, evaluated)
        return objective
    entropy = found[1].detach().cpu()
    sums.add_terms(terms, at[target], entropy[target], evaluated)
    if loss.entropy != 0.0:
        bonus = torch.zeros(len(at), dtype=torch.float64).index_add_(0, target, weight * loss.entropy)
        objective = objective - (found[1] * bonus.to(found[1])).sum()
        sums.loss -= float((bonus * entropy.double()).sum())
    return objective
