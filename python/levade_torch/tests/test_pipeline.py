"""Checks pipeline stages: division of layers, order of passes, and communication, for any number of micro-batches."""

import multiprocessing
import os
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers.distributed.pipeline_parallel import PipelineStage

from levade_torch.errors import StartError
from levade_torch.mesh import Shape
from levade_torch.model import COMBINES_SPLITS
from levade_torch.pipeline import BACKWARD, FORWARD, Pipeline, order

SIZES, BATCHES = range(1, 6), range(9)


def layers(stage: int, size: int, count: int) -> range:
    """Returns the layers that transformers keeps on a stage."""
    return range(*PipelineStage.layer_range_for_rank(SimpleNamespace(pp_size=size), stage, count))


@pytest.mark.skipif(not COMBINES_SPLITS, reason="this version of transformers is refused with --pp, and cuts otherwise")
@pytest.mark.parametrize("size", SIZES)
def test_stages_split_layers_evenly_remainder_first(size):
    for count in range(size, 20):
        runs = [layers(stage, size, count) for stage in range(size)]
        assert [layer for run in runs for layer in run] == list(range(count))
        assert sorted(map(len, runs), reverse=True) == list(map(len, runs))
        assert len(runs[0]) - len(runs[-1]) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batches", BATCHES)
def test_stage_runs_each_micro_batch_forward_and_backward_once(size, batches):
    for stage in range(size):
        passes = list(order(batches, size, stage))
        for way in (FORWARD, BACKWARD):
            assert [number for what, number in passes if what == way] == list(range(batches))
        alive = [sum(1 if what == FORWARD else -1 for what, _ in passes[: i + 1]) for i in range(len(passes))]
        assert max(alive, default=0) == min(batches, size - stage)


def run(size: int, batches: int) -> int:
    """Simulates all stages until they finish. Returns the number of ticks; a pass takes one tick.

    Sending never blocks, as in `Way`.
    """
    passes = [list(order(batches, size, stage)) for stage in range(size)]
    done: list[set] = [set() for _ in range(size)]
    ticks = 0
    while any(passes):
        ready = []
        for stage, left in enumerate(passes):
            if not left:
                continue
            what, number = left[0]
            before = stage - 1 if what == FORWARD else stage + 1
            if not 0 <= before < size or (what, number) in done[before]:
                ready.append(stage)
        assert ready, f"{size} stages stand still with {batches} micro-batches: {[left[:1] for left in passes]}"
        for stage in ready:
            done[stage].add(passes[stage].pop(0))
        ticks += 1
    return ticks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batches", BATCHES)
def test_schedule_has_no_deadlock_and_overlaps_stages(size, batches):
    assert run(size, batches) == (2 * (batches + size - 1) if batches else 0)


class Rendezvous:
    """A stage whose tensors move as with NCCL: sequentially in each direction, and only when both sides have reached
    them.

    Passes are computed in order. A send waits only for the tensor that was sent `size` sends before.
    """

    def __init__(self, batches: int, size: int, stage: int) -> None:
        self.passes = list(order(batches, size, stage))
        # Transfers in each direction as (sender, number), in the order of their requests.
        self.ways: dict[str, list] = {FORWARD: [], BACKWARD: []}
        self.asked, self.arrived, self.sent = False, set(), {FORWARD: 0, BACKWARD: 0}
        self.size, self.stage, self.waits = size, stage, {FORWARD: 0, BACKWARD: 0}

    def advance(self) -> bool:
        """Requests the inputs of the next pass, or computes the pass if they have arrived. Returns whether anything
        changed.
        """
        if not self.passes:
            return False
        what, number = self.passes[0]
        step = 1 if what == FORWARD else -1
        source, sink = self.stage - step, self.stage + step
        if not self.asked:
            self.asked = True
            if 0 <= source < self.size:
                self.ways[what].append((source, number))
            return True
        if 0 <= source < self.size and (source, what, number) not in self.arrived:
            return False
        if any(self.sent[way] < self.waits[way] - self.size for way in self.sent):
            return False
        self.passes.pop(0)
        self.asked = False
        if 0 <= sink < self.size:
            self.ways[what].append((self.stage, number))
            self.waits[what] += 1
        return True


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batches", BATCHES)
def test_schedule_finishes_with_rendezvous_transfers(size, batches):
    stages = [Rendezvous(batches, size, stage) for stage in range(size)]
    while any(stage.passes or any(stage.ways.values()) for stage in stages):
        changed = sum(stage.advance() for stage in stages) > 0
        for upper, lower in pairwise(stages):
            for way, sender, taker in ((FORWARD, upper, lower), (BACKWARD, lower, upper)):
                if sender.ways[way] and sender.ways[way][:1] == taker.ways[way][:1]:
                    (who, number), _ = sender.ways[way].pop(0), taker.ways[way].pop(0)
                    assert who == sender.stage
                    taker.arrived.add((who, way, number))
                    sender.sent[way] += 1
                    changed = True
        assert changed, [(stage.passes[:1], stage.ways) for stage in stages]


def work(rank: int, size: int, meeting: str, batches: int, seconds: float, pipe) -> None:
    """Runs one stage in its own process. It multiplies by its own weight; every pass takes `seconds` and is recorded."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    pipeline = Pipeline.of(size, size, rank, 60.0)
    weight = torch.tensor(float(rank + 2), requires_grad=True)
    dist.barrier()
    under_way, spans = {}, []

    def take_time() -> None:
        started = time.monotonic()
        time.sleep(seconds)
        spans.append((started, time.monotonic()))

    for what, number in order(batches, size, rank):
        if what == FORWARD:
            # Micro-batches have different sizes.
            given = pipeline.states(number + 1, 3, torch.float32, torch.device("cpu"))
            states = torch.full((number + 1, 3), float(number)) if given is None else given.requires_grad_()
            take_time()
            out = states * weight
            under_way[number] = given, out.sum() if pipeline.last else out
            if not pipeline.last:
                pipeline.hand_down(out)
            continue
        given, out = under_way.pop(number)
        gradient = pipeline.gradient(out)
        take_time()
        out.backward(gradient)
        if given is not None:
            pipeline.hand_up(given.grad)
    pipeline.drain()
    ends = torch.tensor([1.0 / 3.0, 1e-8]) * (rank + 1)
    if pipeline.first or pipeline.last:
        pipeline.sum_ends(ends, torch.device("cpu"))
    own = [(f"of {rank}", (2,), torch.float32, lambda: torch.tensor([rank, 0.5]))]
    both = [("of all", (1,), torch.float32, lambda: torch.tensor([float(rank)]))]
    joined = {name: get().tolist() for name, _, _, get in pipeline.join(both + own, torch.device("cpu"))}
    pipe.send((0.0 if weight.grad is None else weight.grad.item(), spans, ends.tolist(), joined))
    dist.barrier()
    os._exit(0)


def staged(size: int, batches: int, seconds: float, directory) -> list[tuple]:
    """Returns the results of every stage."""
    # Forks from a process that has not used autograd: its threads do not survive a fork, and other tests use autograd
    # here.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "levade_torch.pipeline"])
    pipes = [context.Pipe() for _ in range(size)]
    for rank, (_, theirs) in enumerate(pipes):
        options = (rank, size, directory / "meeting", batches, seconds, theirs)
        context.Process(target=work, args=options, daemon=True).start()
    found = []
    for ours, _ in pipes:
        assert ours.poll(120), "a stage did not come to its end"
        found.append(ours.recv())
    return found


@pytest.mark.parametrize(("size", "batches"), [(2, 0), (2, 1), (3, 2), (3, 7)])
def test_stage_processes_match_full_model_gradients(tmp_path, size, batches):
    found = staged(size, batches, 0.0, tmp_path)
    product = float(torch.arange(2, size + 2).prod())
    total = sum(3.0 * (number + 1) * number for number in range(batches))
    assert [gradient for gradient, *_ in found] == pytest.approx([total * product / (rank + 2) for rank in range(size)])
    first, last = found[0][2], found[-1][2]
    assert first == last == (torch.tensor([1.0 / 3.0, 1e-8]) + torch.tensor([1.0 / 3.0, 1e-8]) * size).tolist()
    wanted = {"of all": [0.0]} | {f"of {rank}": [float(rank), 0.5] for rank in range(size)}
    assert all(joined == wanted and list(joined) == list(wanted) for *_, joined in found)


def test_stage_processes_overlap_in_time(tmp_path):
    batches = 6
    first, last = (spans for _, spans, *_ in staged(2, batches, 0.3, tmp_path))
    assert len(first) == len(last) == 2 * batches
    shared = [any(a < d and c < b for c, d in first) for a, b in last]
    # Stages that never work simultaneously would give 0. On an idle machine, all passes except the last overlap.
    assert sum(shared) >= batches, shared


def test_stage_ranks_are_neighbors_and_shard_its_weights():
    shape = Shape(world=16, tensor=2, context=2, expert=1, pipeline=2)
    shape.check()
    assert (shape.stage, shape.shards, shape.data) == (8, 4, 2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(6, 2, 1, 1, 2), "do not divide into --tp 2 × --cp 1 × --pp 2"),
        (Shape(4, 1, 1, 4, 2), "divide the 2 processes of a stage"),
        (Shape(4, 1, 1, 1, 0), "--pp 0; it must be at least 1"),
    ],
)
def test_shape_check_rejects_impossible_sizes(shape, message):
    with pytest.raises(StartError, match=message):
        shape.check()
