"""A branch: a run of its own that begins at a checkpoint of another and decays from there to the end.

The parent is read and never written: its checkpoint is copied, its journal and config stay as they are. The branch is
trained, resumed, mirrored and read like any run, under its own name and lineage.
"""

import shutil
from pathlib import Path
from typing import Any

from rungwise.ladder.changing.branch_config import Start
from rungwise.ladder.changing.course import (
    Course,
    course_of,
    load_events,
    segment_at,
    stretches_of_course,
    total_tokens,
)
from rungwise.ladder.changing.phases import longest_context
from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import CONFIG_FILE, make_folder, read_json
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.ladder.recording.provenance import first_difference, write_run_config

COOLDOWN_SHARE = 0.1
"""Length of a cooldown for which none is given, as a share of the whole parent run."""


def load_run_config(folder: Path) -> RunConfig:
    """The config a run was started with.

    Raises:
        ValueError: no run there.
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        raise ValueError(f"run {folder.name} has not started: {path} is missing; run it first")
    return RunConfig.model_validate(read_json(path)["config"])


def load_course(folder: Path) -> Course:
    """The course of a run that has started, with what was declared so far."""
    return course_of(load_run_config(folder), load_events(folder))


def branch_config(
    parent: RunConfig, course: Course, *, step: int, name: str, tokens: int | None = None, seq_len: int | None = None
) -> RunConfig:
    """The config of a branch that leaves a run after `step` steps.

    Args:
        course: the parent's, as far as declared.
        tokens: of the branch itself; absent: `COOLDOWN_SHARE` of the parent's.
        seq_len: context from its first step on; a step keeps its tokens.
    Raises:
        ValueError: a step outside the run, or tokens that come to no step.
    """
    if not 1 <= step <= course[-1].last_step:
        raise ValueError(f"step {step} is outside run {parent.run}, steps 1 to {course[-1].last_step}")
    segment = segment_at(course, step)
    config = segment.config
    if seq_len is not None and (seq_len < 2 or config.sequences_per_rank * config.model.seq_len % seq_len):
        raise ValueError(
            f"seq_len {seq_len} does not divide the {config.sequences_per_rank * config.model.seq_len} tokens of a rank"
            f" of run {parent.run}; choose a divisor"
        )
    tokens = round(COOLDOWN_SHARE * total_tokens(course)) if tokens is None else tokens
    steps = step + round(tokens / config.tokens_per_step)
    if steps <= step:
        raise ValueError(f"cooldown tokens {tokens} are less than one step of {config.tokens_per_step}; give more")
    start = Start(
        parent=parent.run,
        parent_hash=parent.content_hash,
        step=step,
        tokens=segment.tokens_at(step),
        flops=segment.flops_at(step),
        warmup=segment.decay.warmup,
        rate=segment.decay.at(step - 1),
        anneal=segment.decay.anneal_at(step - 1),
        stretches=tuple(
            (part.first_step, part.seq_len, part.batch_size, part.weights)
            for part in stretches_of_course(course)
            if part.first_step < step
        ),
        longest_context=max(longest_context(parent), seq_len or 0),
    )
    context = () if seq_len is None else ({"start": step / steps, "seq_len": seq_len},)
    changes: dict[str, Any] = {"run": name, "role": "branch", "steps": steps, "start": start, "context": context}
    return config.replace(**changes)


def begin_branch(parent_folder: Path, config: RunConfig) -> Path:
    """Makes a branch's folder: the parent's checkpoint, copied, and the branch's config; returns it.

    Again with the same config it changes nothing.

    Raises:
        ValueError: the parent kept no checkpoint there, or the folder holds another branch.
    """
    assert config.start is not None
    folder, step = parent_folder.parent / config.run, config.start.step
    if (folder / CONFIG_FILE).exists():
        old = load_run_config(folder)
        if old != config:
            where = first_difference(old.model_dump(mode="json"), config.model_dump(mode="json"))
            raise ValueError(f"branch {config.run} is there with another {where}; give it another --name")
        return folder
    kept = Checkpoints(parent_folder / "checkpoints").steps()
    if step not in kept:
        there = ", ".join(map(str, kept)) or "none"
        raise ValueError(
            f"run {config.start.parent} has no checkpoint at step {step} (it has: {there}); choose one of them, or keep"
            f" others with `ladder run … --keep-at` before the run passes them"
        )
    _copy_checkpoint(parent_folder / "checkpoints" / str(step), make_folder(folder / "checkpoints") / str(step))
    corpus = read_json(parent_folder / CONFIG_FILE)["corpus_hash"]
    write_run_config(folder, config, corpus_hash=corpus, course=course_of(config))
    return folder


def begun_branch(folder: Path) -> RunConfig | None:
    """The branch of a folder; None where there is no run, or one that is no branch."""
    config = load_run_config(folder) if (folder / CONFIG_FILE).exists() else None
    return config if config is not None and config.role == "branch" else None


def _copy_checkpoint(source: Path, target: Path) -> None:
    """Whole or absent, like every checkpoint."""
    draft = target.with_name(f".draft-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    if not target.exists():
        shutil.copytree(source, draft)
        draft.rename(target)
