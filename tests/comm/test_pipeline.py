"""Pipelines of tanh layers against the same layers in one piece: virtual stages here, a mesh in `pipeline_child.py`."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rungwise.comm.pipeline import pipeline_gradient
from rungwise.comm.pipeline_schedules import Schedule, layers_of_stages, program_of, stacked_layers

CHILD = Path(__file__).with_name("pipeline_child.py")
_spec = importlib.util.spec_from_file_location("pipeline_child", CHILD)
assert _spec is not None
assert _spec.loader is not None
child = importlib.util.module_from_spec(_spec)  # tests cannot import one another
_spec.loader.exec_module(child)

CASES = child.CASES
ODD = [Schedule("1f1b", 1, 3), Schedule("1f1b", 3, 3, 4), Schedule("gpipe", 2, 4, 2)]


@pytest.mark.parametrize("schedule", [*CASES, *ODD], ids=str)
def test_pipeline_equals_the_model_in_one_piece(schedule):
    params, microbatches = child.make_case(schedule)
    child.check_result(params, microbatches, *child.over_virtual_stages(schedule, params, microbatches))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_pipeline_adds_gradients_of_bfloat16_parameters_in_float32(name):
    # 1 + 64 · 2⁻⁹ = 1.125: a sum in bfloat16 would stay at 1, since 2⁻⁹ is below half its step.
    schedule = Schedule(name, 2, 65)
    addend = jnp.asarray([1.0] + [2.0**-9] * 64, jnp.bfloat16)[:, None]

    def leave(params, carry, microbatch):
        assert params.dtype == jnp.bfloat16
        return jnp.sum((params * microbatch).astype(jnp.float32)), None

    def one_stage(weight):
        pipeline = child.pipeline_of(lambda params, microbatch: microbatch * 0, None, leave)
        return pipeline_gradient(pipeline, weight, addend, axis="pipe", schedule=schedule)[0]

    grads = jax.vmap(one_stage, axis_name="pipe")(jnp.ones((2, 1), jnp.bfloat16))
    assert grads.dtype == jnp.float32
    np.testing.assert_array_equal(grads, [[0.0], [1.125]])


def test_pipeline_refuses_what_does_not_fit_its_schedule():
    params, microbatches = child.make_case(Schedule("1f1b", 2, 4))
    with pytest.raises(ValueError, match="num_stages 4 does not match axis 'pipe' of size 2"):
        child.over_virtual_stages(Schedule("1f1b", 4, 4), params, microbatches, size=2)
    with pytest.raises(ValueError, match=r"num_microbatches 3 does not match the \[4\] given"):
        child.over_virtual_stages(Schedule("1f1b", 2, 3), params, microbatches)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("2f2b", 2, 4), "'2f2b' is unknown; choose one of gpipe, 1f1b"),
        (("gpipe", 0, 4), "num_stages 0 is below 1"),
        (("gpipe", 2, 4, 0), "num_chunks 0 is below 1"),
        (("1f1b", 4, 6, 2), "num_microbatches 6 is no multiple of num_stages 4"),
    ],
)
def test_schedule_refuses_in_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as caught:
        Schedule(*fields)
    assert "\n" not in str(caught.value)


EVERY = [
    Schedule(name, stages, microbatches, chunks)
    for stages in range(1, 6)
    for microbatches in range(1, 11)
    for name in ("gpipe", "1f1b")
    for chunks in (1, 2, 3)
    if chunks == 1 or microbatches % stages == 0
]


def live(schedule):
    """Of each stage, the most forwards without their backward after any tick of the table."""
    signs = [[0 if work is None else 1 - 2 * work.backward for work in row] for row in schedule.table]
    return tuple(np.cumsum(signs, axis=0).max(axis=0))


def check_order(schedule):
    """Everything is done once, and after what it needs."""
    when = {
        (work.backward, work.chunk * schedule.num_stages + stage, work.microbatch): tick
        for tick, row in enumerate(schedule.table)
        for stage, work in enumerate(row)
        if work is not None
    }
    positions = schedule.num_stages * schedule.num_chunks
    work_done = sum(work is not None for row in schedule.table for work in row)
    assert len(when) == work_done == 2 * positions * schedule.num_microbatches
    for (backward, place, microbatch), tick in when.items():
        if backward:
            assert tick > when[False, place, microbatch]
            assert place == positions - 1 or tick > when[True, place + 1, microbatch]
        else:
            assert place == 0 or tick > when[False, place - 1, microbatch]


def test_schedule_tables_are_in_order_and_their_closed_forms_hold():
    for schedule in EVERY:
        check_order(schedule)
        bubbles = Counter(work is None for row in schedule.table for work in row)
        assert len(schedule.table) == schedule.num_ticks, schedule
        assert bubbles[True] / bubbles.total() == pytest.approx(schedule.bubble_fraction, abs=1e-12), schedule
        assert live(schedule) == schedule.live_activations, schedule


def test_schedule_gives_the_published_figures():
    # Olmo-core 3: four stages in two chunks, eight microbatches: 11/9/7/5 live activations, bubble 15.8 %.
    assert Schedule("1f1b", 4, 8).live_activations == (4, 3, 2, 1)
    looped = Schedule("1f1b", 4, 8, 2)
    assert looped.live_activations == (11, 9, 7, 5)
    assert round(100 * looped.bubble_fraction, 1) == 15.8


def play(schedule):
    """A program with names instead of arrays: every read finds what the neighbour sent."""
    program = program_of(schedule)
    stages, positions = schedule.num_stages, schedule.num_stages * schedule.num_chunks
    inputs = [[None] * (program.num_inputs + 1) for _ in range(stages)]
    cotangents = [[None] * (program.num_cotangents + 1) for _ in range(stages)]
    for steps in program.steps:
        ahead, behind = [None] * stages, [None] * stages
        for stage, step in enumerate(steps):
            place = step.chunk * stages + stage
            if step.action and place:
                assert inputs[stage][step.input_slot] == (place, step.microbatch)
            if step.action == 2 and place < positions - 1:
                assert cotangents[stage][step.cotangent_slot] == (place, step.microbatch)
            if step.action == 1:
                ahead[stage] = (place + 1, step.microbatch)
            if step.action == 2:
                behind[stage] = (place - 1, step.microbatch)
        for stage, step in enumerate(steps):
            inputs[stage][step.arriving_input] = ahead[stage - 1]
            cotangents[stage][step.arriving_cotangent] = behind[(stage + 1) % stages]
    return program


def test_program_keeps_what_waits_in_no_more_slots_than_activations_are_live():
    for schedule in EVERY:
        program = play(schedule)
        assert program.num_inputs <= max(1, *schedule.live_activations), schedule
        assert program.num_cotangents <= program.num_inputs, schedule
    assert program_of(Schedule("1f1b", 4, 100)).num_inputs == 4
    assert program_of(Schedule("1f1b", 4, 100)).num_cotangents == 1


def test_layers_of_stages_are_consecutive_and_the_last_makes_room():
    counts = [len(layers) for layers in layers_of_stages(48, num_stages=4, head_layers=2)]
    assert counts == [13, 13, 12, 10]
    assert stacked_layers(7, num_stages=2, num_chunks=2) == (0, 1, 4, 5, 2, 3, 6, -1)
    with pytest.raises(ValueError, match="num_layers 3 leaves one of 4 stages without a layer"):
        layers_of_stages(3, num_stages=4)
    with pytest.raises(ValueError, match="head_layers 6"):
        layers_of_stages(6, num_stages=2, head_layers=6)


@pytest.mark.slow
def test_pipeline_on_a_mesh(on_eight_devices):
    """Equal to one piece with and without types that vary, as many permutes as ticks, memory bounded by stages."""
    report = json.loads(on_eight_devices(CHILD))
    assert report["compared"] == 2 * len(CASES)
    for name, permutes in report["permutes"].items():
        schedule = CASES[int(name)]
        # one to the next stage, one to the stage before, each in one scanned body
        assert permutes["in_text"] == 2, schedule
        runs = schedule.num_ticks if schedule.name == "1f1b" else schedule.num_ticks // 2
        assert permutes["run"] == 2 * runs, schedule
    carry, weights = 4 * 256 * 64, 4 * 512**2
    grown = {name: after - before for name, (before, after) in report["temporaries"].items()}
    assert grown["1f1b"] < carry
    assert grown["gpipe"] >= 12 * carry  # one more for each of twelve microbatches more
    assert max(report["wide"].values()) < 3 * weights  # weights are not kept once a tick
