"""Weights of a checkpoint for use elsewhere: one safetensors file and the config beside it, without optimizer state.

Layout of a safetensors file: 8 bytes, little-endian, with the length of the JSON header; the header, name → dtype,
shape and place in bytes; the raw values in row-major order. Source: huggingface/safetensors, README, "Format".
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rungwise.ladder.family import RunConfig
from rungwise.ladder.home import CONFIG_FILE, make_folder, read_json, write_json
from rungwise.ladder.recording.checkpoint import Checkpoints
from rungwise.model.config import ModelConfig

WEIGHTS_FILE: Final = "model.safetensors"
BIAS: Final = "balancing_bias"
"""Of each layer's experts: state, not a parameter, but routes depend on it."""
_ALIGNMENT: Final = 8
_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def export_weights(run_folder: Path, target: Path, *, step: int | None = None) -> Path:
    """Writes the weights of a run's checkpoint, its latest unless a step is given; returns the file.

    Raises:
        ValueError: no run or no whole checkpoint there, or a target that cannot be written to.
    """
    document = read_json(run_folder / CONFIG_FILE)
    config = RunConfig.model_validate(document["config"])
    step, tree = _read_state(run_folder, config, step)
    tensors = {name: np.asarray(leaf) for name, leaf in _named(tree["params"])} | {BIAS: np.asarray(tree["bias"])}
    metadata = {"family": config.family, "run": config.run, "step": str(step), "config_hash": config.content_hash}
    path = make_folder(target) / WEIGHTS_FILE
    write_safetensors(path, tensors, metadata=metadata)
    origin = {name: document[name] for name in ("family", "run", "config_hash", "corpus_hash", "code_version")}
    write_json(target / CONFIG_FILE, {**origin, "step": step, "model": config.model.model_dump(mode="json")})
    return path


def load_exported(folder: Path) -> tuple[ModelConfig, dict[str, Any], np.ndarray]:
    """The model, its parameters as nested dicts of arrays, and the balancing bias [layers, experts].

    Raises:
        ValueError: not an export of ours, or a file that is not whole.
    """
    model = ModelConfig.model_validate(read_json(folder / CONFIG_FILE)["model"])
    tensors = read_safetensors(folder / WEIGHTS_FILE)
    bias = tensors.pop(BIAS)
    params: dict[str, Any] = {}
    for name, array in tensors.items():
        *path, leaf = name.split(".")
        table = params
        for key in path:
            table = table.setdefault(key, {})
        table[leaf] = array
    return model, params, bias


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str]) -> None:
    """Writes a file that any safetensors reader opens; all or nothing.

    Raises:
        ValueError: a type that the format does not know.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, array in tensors.items():
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"tensor {name!r} is {array.dtype.name}; safetensors knows {', '.join(_DTYPES)}")
        shape, end = list(array.shape), at + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    draft = path.with_name(f".{path.name}")
    with draft.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())
    draft.replace(path)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Arrays by name.

    Raises:
        ValueError: the file is not whole, or its header does not fit its size.
    """
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else math.inf
    if 8 + length > len(data):
        raise ValueError(f"{path} is not a whole safetensors file ({len(data)} bytes); export it again")
    header = json.loads(data[8 : 8 + int(length)])
    values = data[8 + int(length) :]
    known = {word: name for name, word in _DTYPES.items()}
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        dtype = _dtype(known[entry["dtype"]])
        if end > len(values) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
            raise ValueError(f"{path}: tensor {name!r} is cut off or has another size; export it again")
        tensors[name] = np.frombuffer(values[begin:end], dtype).reshape(entry["shape"])
    return tensors


def _dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes  # NumPy's own types do not have bfloat16

    return np.dtype(getattr(ml_dtypes, name, None) or name)


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
