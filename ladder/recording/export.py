"""Weights of a checkpoint for use elsewhere: one safetensors file and the config beside it, without optimizer state."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import CONFIG_FILE, make_folder, read_json, write_json
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.model.config import ModelConfig

WEIGHTS_FILE: Final = "model.safetensors"
BIAS: Final = "balancing_bias"
"""Of each layer's experts: state, not a parameter, but routes depend on it."""


def export_weights(run_folder: Path, target: Path, *, step: int | None = None) -> Path:
    """Writes the weights of a run's checkpoint, its latest unless a step is given; returns the file.

    Raises:
        ValueError: no run or no whole checkpoint there, or a target that cannot be written to.
    """
    document = read_json(run_folder / CONFIG_FILE)
    config = RunConfig.model_validate(document["config"])
    step, tree = _read_state(run_folder, config, step)
    leaves = {**dict(_named(tree["params"])), BIAS: tree["bias"]}
    tensors = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}  # the writer takes rows as they lie
    metadata = {"family": config.family, "run": config.run, "step": str(step), "config_hash": config.content_hash}
    path = make_folder(target) / WEIGHTS_FILE
    draft = path.with_name(f".{path.name}")
    save_file(tensors, draft, metadata=metadata)
    draft.replace(path)
    origin = {name: document[name] for name in ("family", "run", "config_hash", "corpus_hash", "code_version")}
    write_json(target / CONFIG_FILE, {**origin, "step": step, "model": config.model.model_dump(mode="json")})
    return path


def load_exported(folder: Path) -> tuple[ModelConfig, dict[str, Any], np.ndarray]:
    """The model, its parameters as nested dicts of arrays, and the balancing bias [layers, experts].

    Raises:
        ValueError: not an export of ours, or a file that is not whole.
    """
    model = ModelConfig.model_validate(read_json(folder / CONFIG_FILE)["model"])
    file = folder / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file ({error}); export it again") from error
    bias = tensors.pop(BIAS)
    params: dict[str, Any] = {}
    for name, array in tensors.items():
        *path, leaf = name.split(".")
        table = params
        for key in path:
            table = table.setdefault(key, {})
        table[leaf] = array
    return model, params, bias


def _read_state(run_folder: Path, config: RunConfig, step: int | None) -> tuple[int, dict[str, Any]]:
    import jax

    from rungwise.ladder.training.step import init_state, state_to_tree

    like = state_to_tree(jax.eval_shape(lambda: init_state(config)))
    found, tree, _ = Checkpoints(run_folder / "checkpoints").restore(like, step)
    return found, tree


def _named(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _named(value, f"{name}.")
        else:
            yield name, value
