"""Stages of a pipeline: how layers are divided, and in which order stages work, for any number of micro-batches."""

from types import SimpleNamespace

import pytest
from transformers.distributed.pipeline_parallel import PipelineStage

from dressage_torch.errors import StartError
from dressage_torch.mesh import Shape
from dressage_torch.pipeline import BACKWARD, FORWARD, order

SIZES, BATCHES = range(1, 6), range(9)


def layers(stage: int, size: int, count: int) -> range:
    """What transformers keeps on a stage."""
    return range(*PipelineStage.layer_range_for_rank(SimpleNamespace(pp_size=size), stage, count))


@pytest.mark.parametrize("size", SIZES)
def test_stages_hold_equal_runs_of_all_layers_and_the_first_hold_what_is_left_over(size):
    for count in range(size, 20):
        runs = [layers(stage, size, count) for stage in range(size)]
        assert [layer for run in runs for layer in run] == list(range(count))
        assert sorted(map(len, runs), reverse=True) == list(map(len, runs))
        assert len(runs[0]) - len(runs[-1]) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batches", BATCHES)
def test_every_stage_passes_over_every_micro_batch_once_in_each_direction(size, batches):
    for stage in range(size):
        passes = list(order(batches, size, stage))
        for way in (FORWARD, BACKWARD):
            assert [number for what, number in passes if what == way] == list(range(batches))
        alive = [sum(1 if what == FORWARD else -1 for what, _ in passes[: i + 1]) for i in range(len(passes))]
        assert max(alive, default=0) == min(batches, size - stage)


def run(size: int, batches: int) -> int:
    """Lets all stages work on what has arrived until they are done; returns in how many ticks, of a pass each.

    Sending waits for nobody, as in `Way`.
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
def test_stages_never_wait_for_each_other_in_a_circle_and_work_at_once(size, batches):
    assert run(size, batches) == (2 * (batches + size - 1) if batches else 0)


def test_ranks_of_a_stage_are_neighbours_and_share_its_weights():
    shape = Shape(world=16, tensor=2, context=2, expert=1, pipeline=2)
    shape.check()
    assert (shape.stage, shape.shards, shape.data) == (8, 4, 2)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(6, 2, 1, 1, 2), "do not divide into --tp 2 × --cp 1 × --pp 2"),
        (Shape(4, 1, 1, 4, 2), "divide the 2 processes of a stage"),
        (Shape(4, 1, 1, 1, 0), "--pp 0; it must be at least 1"),
    ],
)
def test_sizes_that_make_up_no_group_are_refused(shape, said):
    with pytest.raises(StartError, match=said):
        shape.check()
