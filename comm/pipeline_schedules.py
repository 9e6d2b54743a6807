"""Which pipeline stage does what when: schedules as tables, with their bubbles and what they keep alive.

Imports no jax: planning reads the tables that `comm/pipeline.py` runs. A tick is one microbatch forward or backward
through one chunk of one stage. A stage holds one chunk of layers, or several (interleaved): with S stages, chunk c of
stage s is position c·S + s in the model.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

SCHEDULES = ("gpipe", "1f1b")
"""`gpipe`: all microbatches forward, then all backward. `1f1b`: backward as soon as possible, in turn with forward."""


class Work(NamedTuple):
    """What a stage does in one tick."""

    backward: bool
    chunk: int
    microbatch: int


Table = tuple[tuple[Work | None, ...], ...]
"""`table[tick][stage]`; None is a bubble."""


@dataclass(frozen=True)
class Schedule:
    """A pipeline of `num_stages` stages that work on `num_microbatches` microbatches a step.

    Attributes:
        num_chunks: chunks of layers a stage holds; more than one makes it the interleaved schedule.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int = 1

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"schedule {self.name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        for field in ("num_stages", "num_microbatches", "num_chunks"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} {getattr(self, field)} is below 1; set at least 1")
        if self.num_chunks > 1 and self.num_microbatches % self.num_stages:
            raise ValueError(
                f"num_microbatches {self.num_microbatches} is no multiple of num_stages {self.num_stages}, which"
                f" num_chunks {self.num_chunks} needs; change one of them"
            )

    @property
    def num_ticks(self) -> int:
        """2 · (microbatches · chunks + stages − 1)."""
        return 2 * (self.num_microbatches * self.num_chunks + self.num_stages - 1)

    @property
    def bubble_fraction(self) -> float:
        """Share of a stage's ticks without work: (S − 1) / (M · chunks + S − 1), forward and backward counted alike.

        Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, section 2.2.
        """
        return (self.num_stages - 1) / (self.num_microbatches * self.num_chunks + self.num_stages - 1)

    @property
    def live_activations(self) -> tuple[int, ...]:
        """Of each stage, the most forwards that wait for their backward at one time, each of one chunk.

        gpipe: M · chunks. 1f1b: S − s. Interleaved: 2 · (S − 1 − s) + (chunks − 1) · S + 1. Never more than M · chunks.
        """
        total = self.num_microbatches * self.num_chunks
        if self.name == "gpipe":
            return (total,) * self.num_stages
        return tuple(min(total, self._warm_up(stage) + 1) for stage in range(self.num_stages))

    @cached_property
    def table(self) -> Table:
        """Each stage's work in its own order, every item as soon as what it needs has arrived."""
        order = [self._order(stage) for stage in range(self.num_stages)]
        done: dict[tuple[bool, int, int], int] = {}  # (backward, position, microbatch) → tick
        waiting, rows = [0] * self.num_stages, []
        while any(position < len(work) for position, work in zip(waiting, order, strict=True)):
            tick, row = len(rows), []
            for stage, position in enumerate(waiting):
                work = order[stage][position] if position < len(order[stage]) else None
                ready = work is not None and all(done.get(need, tick) < tick for need in self._needs(stage, work))
                row.append(work if ready else None)
            for stage, work in enumerate(row):
                if work is not None:
                    done[(work.backward, self.position(stage, work.chunk), work.microbatch)] = tick
                    waiting[stage] += 1
            assert any(row), "a schedule whose stages wait for each other"
            rows.append(tuple(row))
        return tuple(rows)

    def position(self, stage: int, chunk: int) -> int:
        """Place of a chunk in the model, from 0."""
        return chunk * self.num_stages + stage

    def _needs(self, stage: int, work: Work) -> list[tuple[bool, int, int]]:
        place = self.position(stage, work.chunk)
        if not work.backward:
            return [(False, place - 1, work.microbatch)] if place else []
        last = place == self.num_stages * self.num_chunks - 1
        return [(False, place, work.microbatch), *([] if last else [(True, place + 1, work.microbatch)])]

    def _warm_up(self, stage: int) -> int:
        """Forwards of a stage before its first backward, less the one that belongs to that backward."""
        after = self.num_stages - 1 - stage
        return after if self.num_chunks == 1 else 2 * after + (self.num_chunks - 1) * self.num_stages

    def _order(self, stage: int) -> list[Work]:
        """Everything a stage does, in turn. Interleaved: S microbatches at a time pass one chunk after another."""
        stages, chunks = self.num_stages, self.num_chunks
        group = stages if chunks > 1 else 1
        units = [
            (chunk, first + offset)
            for first in range(0, self.num_microbatches, group)
            for chunk in range(chunks)
            for offset in range(group)
        ]
        forward = [Work(False, chunk, microbatch) for chunk, microbatch in units]
        backward = [Work(True, chunks - 1 - chunk, microbatch) for chunk, microbatch in units]
        if self.name == "gpipe":
            return forward + backward
        warm_up = min(len(units), self._warm_up(stage))
        steady = [work for pair in zip(forward[warm_up:], backward, strict=False) for work in pair]
        return forward[:warm_up] + steady + backward[len(units) - warm_up :]


def layers_of_stages(
    num_layers: int, *, num_stages: int, num_chunks: int = 1, head_layers: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Layer indices of each position of a pipeline, consecutive, as equal as they can be, the longest first.

    Args:
        head_layers: layers that the head at the last position counts for, which therefore holds fewer.
    Raises:
        ValueError: a position would have no layer.

    >>> [len(layers) for layers in layers_of_stages(47, num_stages=4, head_layers=1)]
    [12, 12, 12, 11]
    """
    positions = num_stages * num_chunks
    shortest, longer = divmod(num_layers + head_layers, positions)
    counts = [shortest + (position < longer) for position in range(positions)]
    counts[-1] -= head_layers
    if min(counts) < 1:
        raise ValueError(
            f"num_layers {num_layers} leaves one of {positions} stages without a layer (num_stages {num_stages},"
            f" num_chunks {num_chunks}, head_layers {head_layers}); use fewer stages"
        )
    first = [sum(counts[:position]) for position in range(positions)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(first, counts, strict=True))


def stacked_layers(num_layers: int, *, num_stages: int, num_chunks: int = 1, head_layers: int = 0) -> tuple[int, ...]:
    """Layer of every row of a stack whose equal parts, in order, are the stages' own; −1 where a row is padding.

    >>> stacked_layers(5, num_stages=2)
    (0, 1, 2, 3, 4, -1)
    """
    by_position = layers_of_stages(num_layers, num_stages=num_stages, num_chunks=num_chunks, head_layers=head_layers)
    longest = max(len(layers) for layers in by_position)
    rows: list[int] = []
    for stage in range(num_stages):
        for layers in by_position[stage::num_stages]:
            rows += [*layers, *(-1,) * (longest - len(layers))]
    return tuple(rows)


class Step(NamedTuple):
    """One tick of one stage as numbers (or traced scalars), for a program that is the same on every stage."""

    action: Any
    """0 rest, 1 forward, 2 backward."""
    chunk: Any
    microbatch: Any
    input_slot: Any
    """Where the carry lies that this work reads; anywhere at the first position, which reads tokens instead."""
    cotangent_slot: Any
    """Where the gradient lies that a backward reads; anywhere at the last position, which has the loss instead."""
    arriving_input: Any
    """Where to put the carry that arrives when the tick ends; the number of slots where none does."""
    arriving_cotangent: Any


class Program(NamedTuple):
    """A schedule with a place for everything that waits."""

    steps: tuple[tuple[Step, ...], ...]
    """[ticks][stages]."""
    num_inputs: int
    """Slots for carries, on every stage: at least one, at most as many as the schedule has live activations."""
    num_cotangents: int


def program_of(schedule: Schedule) -> Program:
    """The schedule's table with slots. What arrives keeps its slot until its backward has read it."""
    when = {
        (work.backward, schedule.position(stage, work.chunk), work.microbatch): tick
        for tick, row in enumerate(schedule.table)
        for stage, work in enumerate(row)
        if work is not None
    }
    inputs, cotangents = _slots(schedule, when, backward=False), _slots(schedule, when, backward=True)
    num_inputs, num_cotangents = (max(slots.values(), default=0) + 1 for slots in (inputs, cotangents))

    def step(row: tuple[Work | None, ...], stage: int) -> Step:
        work, before, after = row[stage], row[stage - 1], row[(stage + 1) % schedule.num_stages]
        arriving_input, arriving_cotangent = num_inputs, num_cotangents
        if before is not None and not before.backward:
            place = schedule.position((stage - 1) % schedule.num_stages, before.chunk) + 1
            arriving_input = inputs.get((place, before.microbatch), num_inputs)
        if after is not None and after.backward:
            place = schedule.position((stage + 1) % schedule.num_stages, after.chunk) - 1
            arriving_cotangent = cotangents.get((place, after.microbatch), num_cotangents)
        if work is None:
            return Step(0, 0, 0, 0, 0, arriving_input, arriving_cotangent)
        own = schedule.position(stage, work.chunk), work.microbatch
        slots = inputs.get(own, 0), cotangents.get(own, 0)
        return Step(1 + work.backward, work.chunk, work.microbatch, *slots, arriving_input, arriving_cotangent)

    steps = tuple(tuple(step(row, stage) for stage in range(schedule.num_stages)) for row in schedule.table)
    return Program(steps, num_inputs, num_cotangents)


def _slots(schedule: Schedule, when: dict[tuple[bool, int, int], int], *, backward: bool) -> dict[tuple[int, int], int]:
    """A slot for the carry (or gradient) of each (position, microbatch), free again once its backward has read it."""
    positions, slots = schedule.num_stages * schedule.num_chunks, {}
    for stage in range(schedule.num_stages):
        spans = []
        for place in range(stage, positions, schedule.num_stages):
            source = place + 1 if backward else place - 1
            if 0 <= source < positions:
                for microbatch in range(schedule.num_microbatches):
                    arrival, last_use = when[backward, source, microbatch], when[True, place, microbatch]
                    spans.append((arrival, last_use, place, microbatch))
        free_from: list[int] = []  # by slot, the tick at whose end it may be written again
        for arrival, last_use, place, microbatch in sorted(spans):
            slot = next((slot for slot, tick in enumerate(free_from) if tick <= arrival), len(free_from))
            free_from[slot : slot + 1] = [last_use]
            slots[place, microbatch] = slot
    return slots
