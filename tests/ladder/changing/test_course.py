"""The course of a run: segments, marks and plan from config, phases and declared events."""

from itertools import pairwise
from typing import Any

import pytest

from rungwise.ladder.changing.course import (
    changes_until,
    course_of,
    learning_rate_at,
    marks_of,
    plan_course,
    segment_at,
    stretches_of_course,
    total_tokens,
)
from rungwise.ladder.family import RunConfig, load_family
from rungwise.ladder.planning.plan import plan_run

HERO = load_family("tiny").hero_run
SHORTER: dict[str, Any] = {"kind": "schedule", "step": 248, "change": {"steps": 740}}


def _with_context(*phases: tuple[float, int]) -> RunConfig:
    return HERO.replace(context=tuple({"start": start, "seq_len": length} for start, length in phases))


def _parts(config: RunConfig, *events: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [(part.first_step, part.last_step, part.config.model.seq_len) for part in course_of(config, events)]


def test_a_run_nobody_changed_is_one_segment_with_its_own_plan_and_marks():
    (whole,) = course = course_of(HERO, [{"kind": "note", "step": 3}])
    assert (whole.first_step, whole.last_step, whole.tokens_before) == (0, HERO.steps, 0)
    assert whole.config.content_hash == HERO.content_hash
    assert plan_course(course) == plan_run(HERO)
    assert sorted(marks_of(course, 0.1)) == [round(HERO.steps * part / 10) for part in range(1, 11)]


def test_a_declared_length_changes_steps_plan_marks_and_rate_together():
    course = course_of(HERO, [SHORTER])
    plan, before = plan_course(course), plan_run(HERO)
    assert [(part.first_step, part.last_step) for part in course] == [(0, 247), (247, 740)]
    assert (plan.steps, plan.tokens) == (740, 740 * HERO.tokens_per_step)
    assert plan.flops == pytest.approx(before.flops * 740 / HERO.steps, rel=1e-12)
    assert course[-1].flops_at(740) == pytest.approx(plan.flops, rel=1e-12)
    assert learning_rate_at(course, 740) == pytest.approx(0.05 * HERO.learning_rate)
    fall = learning_rate_at(course, 247) - learning_rate_at(course, 248)
    assert 0 < fall == pytest.approx(learning_rate_at(course, 300) - learning_rate_at(course, 301), rel=1e-9)
    assert [mark for mark in sorted(marks_of(course, 0.1)) if mark > 247] == [74 * part for part in range(4, 11)]
    assert segment_at(course, 247).config.steps == HERO.steps != segment_at(course, 248).config.steps


def test_phases_to_come_keep_their_share_and_those_begun_their_step():
    config = _with_context((0.5, 64), (0.9, 32))
    assert _parts(config) == [(0, 617, 128), (617, 1111, 64), (1111, 1234, 32)]
    assert _parts(config, SHORTER) == [(0, 247, 128), (247, 370, 128), (370, 666, 64), (666, 740, 32)]
    longer = {"kind": "schedule", "step": 701, "change": {"steps": 2000}}
    assert _parts(config, longer) == [(0, 617, 128), (617, 700, 64), (700, 1800, 64), (1800, 2000, 32)]


def test_a_phase_that_a_shorter_run_has_passed_begins_at_once():
    late = {"kind": "schedule", "step": 601, "change": {"steps": 800}}
    assert _parts(_with_context((0.5, 64)), late) == [(0, 600, 128), (600, 800, 64)]


def test_a_refused_context_phase_leaves_the_length_before_it():
    refusal = {"kind": "note", "step": 618, "refused": 0}
    assert _parts(_with_context((0.5, 64), (0.9, 32)), refusal) == [(0, 1111, 128), (1111, 1234, 32)]


def test_tokens_are_counted_through_changes_of_shape():
    course = course_of(_with_context((0.5, 64), (0.9, 32)), [SHORTER])
    assert total_tokens(course) == 740 * HERO.tokens_per_step
    for before, after in pairwise(course):
        assert after.tokens_before == before.tokens_at(before.last_step)
    assert [stretch.seq_len for stretch in stretches_of_course(course)] == [128, 64, 32]


def test_transport_and_balance_change_as_events():
    events = [
        {"kind": "transport", "step": 100, "change": {"transport.name": "ragged", "model.balance": "none"}},
        {"kind": "transport", "step": 200, "change": {"transport.receiver_capacity_factor": 1.5}},
    ]
    first, second, third = course_of(HERO, events)
    assert (first.config.transport.name, first.last_step) == ("pooled_wave", 99)
    assert (second.config.transport.name, second.config.model.balance, second.kinds) == (
        "ragged",
        "none",
        ("transport",),
    )
    assert third.config.transport.receiver_capacity_factor == 1.5
    assert learning_rate_at((first, second, third), 500) == pytest.approx(learning_rate_at(course_of(HERO), 500))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("schedule", {"learning_rate": 0.1}, "event 'schedule' cannot change 'learning_rate'; it may change steps"),
        ("transport", {"model.hidden_dim": 64}, "cannot change 'model.hidden_dim'"),
        ("transport", {"transport.name": "pigeon"}, "event 'transport' of run hero: .*pigeon"),
        ("note", {"steps": 3}, "it may change nothing"),
        ("schedule", {"steps": 100}, "steps 100 are not more than the 247"),
    ],
)
def test_a_change_that_does_not_work_is_refused_with_field_and_value(kind: str, change: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        course_of(HERO, [{"kind": kind, "step": 248, "change": change}])


def test_changes_until_a_step_are_those_that_have_acted():
    assert changes_until([SHORTER], 247) == []
    assert changes_until([{"kind": "note", "step": 2}, SHORTER], 248) == [[248, "schedule", {"steps": 740}]]
