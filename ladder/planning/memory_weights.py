"""Where a run's parameters and optimizer state lie on a mesh, in elements of one device. Imports no jax.

The names and shapes are those of `model/transformer.py`, the rules those of `mesh/mesh_layout.py` and
`training/optimizer.py`; the tests compare all of them.
"""

import math
from dataclasses import dataclass

from rungwise.ladder.family import RunConfig
from rungwise.ladder.mesh.mesh_config import MeshConfig
from rungwise.model.config import ModelConfig

EXPERTS = "layers.moe.experts."

MOST_PADDING = 2.0
"""As in `comm/sharded.py`."""

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Shape of every parameter by name, layers stacked."""
    layers, width, vocab, rank = model.num_layers, model.hidden_dim, model.vocab_size, model.gated_norm_rank
    shapes: Shapes = {"embed": (vocab, width), "final_norm": (width,)}
    if not model.tied_head:
        shapes["head"] = (width, vocab)
    if model.embed_norm:
        shapes["embed_norm"] = (width,)
    gated = ["final_norm"] + (["embed_norm"] if model.embed_norm else [])
    if rank:
        shapes |= {f"{norm}_gate.down": (width, rank) for norm in gated}
        shapes |= {f"{norm}_gate.up": (rank, width) for norm in gated}
    of_layer = {**_attention_shapes(model), **_moe_shapes(model), "attention_norm": (width,), "moe_norm": (width,)}
    if rank:
        for norm in ("attention_norm", "moe_norm"):
            of_layer |= {f"{norm}_gate.down": (width, rank), f"{norm}_gate.up": (rank, width)}
    return shapes | {f"layers.{name}": (layers, *shape) for name, shape in of_layer.items()}


def _attention_shapes(model: ModelConfig) -> Shapes:
    width, heads, kv_heads, dim = model.hidden_dim, model.num_heads, model.num_kv_heads, model.head_dim
    shapes: Shapes = {
        "attention.query": (width, heads, dim),
        "attention.key": (width, kv_heads, dim),
        "attention.value": (width, kv_heads, dim),
        "attention.out": (heads, dim, width),
    }
    if model.learned_query_key_norm:
        shapes |= {"attention.query_norm": (dim,), "attention.key_norm": (dim,)}
    if model.attention_gate:
        shapes["attention.gate"] = (width, heads)
    channels = {"key": kv_heads * dim, "value": kv_heads * dim, "attention": width, "moe": width}
    return shapes | {f"conv.{site}": (model.short_conv_kernel, channels[site]) for site in model.short_conv_sites}


def _moe_shapes(model: ModelConfig) -> Shapes:
    width, routed, inner = model.hidden_dim, model.routed_dim, model.expert_dim
    shapes: Shapes = {
        "moe.router": (width, model.num_experts),
        "moe.experts.gate_up": (model.num_experts, routed, 2, inner),
        "moe.experts.down": (model.num_experts, inner, routed),
    }
    if model.latent_dim is not None:
        shapes |= {"moe.latent_down": (width, routed), "moe.latent_norm": (routed,), "moe.latent_up": (routed, width)}
    if model.num_shared_experts:
        shared = model.num_shared_experts * inner
        shapes |= {"moe.shared.gate_up": (width, 2, shared), "moe.shared.down": (shared, width)}
    return shapes


_NO_MATRIX = frozenset(["embed", "head", "router", "gate"])


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon moves the parameter: matrices of layers and gates of norms, no vectors, convolutions, router."""
    stack = name.startswith("layers.")
    return len(shape) > 1 + stack and ".conv." not in name and name.rsplit(".", 1)[-1] not in _NO_MATRIX


def stack_dims(name: str) -> int:
    """Leading dimensions whose entries are matrices."""
    return 2 if name.startswith(EXPERTS) else int(name.startswith("layers."))


def square_share(name: str, shape: tuple[int, ...]) -> float:
    """Elements of the square of a matrix's smaller side over those of the matrix."""
    dims = shape[stack_dims(name) :]
    rows = dims[0] * dims[1] if name.endswith("attention.out") else dims[0]
    per_matrix = math.prod(dims) // (2 if name.endswith("gate_up") else 1)
    columns = per_matrix // rows
    return min(rows, columns) / max(rows, columns)


def moments(name: str, shape: tuple[int, ...], optimizer: str) -> int:
    """Values the optimizer keeps a weight: one momentum of Muon, two moments of Adam."""
    return 1 if optimizer != "adamw" and is_matrix(name, shape) else 2


@dataclass(frozen=True, kw_only=True)
class DeviceWeight:
    """One parameter on one device, in elements."""

    shape: tuple[int, ...]
    """Whole, on all devices together."""
    rest: int
    """Between steps."""
    part: int
    """What this device's optimizer sees of it."""
    used: int
    """In the forward pass, all layers of this device: `rest`, but for slices, which are gathered."""
    gathered: int
    """Of one layer, where slices are gathered; else 0."""


def device_weights(config: RunConfig, mesh: MeshConfig) -> dict[str, DeviceWeight]:
    """Every parameter on the fullest device of a mesh."""
    used = {axis: size for axis, size in mesh.sizes.items() if size > 1}
    return {
        name: _place(name, shape, used, mesh, config.optimizer.name)
        for name, shape in parameter_shapes(config.model).items()
    }


def _place(name: str, shape: tuple[int, ...], used: dict[str, int], mesh: MeshConfig, optimizer: str) -> DeviceWeight:
    local, of_layer = list(shape), name.startswith("layers.")
    if of_layer:
        local[0] = mesh.pipe_chunks * max(map(len, mesh.layers(shape[0]))) if mesh.pipe > 1 else shape[0]
    if name.startswith(EXPERTS):
        local[1] = -(-shape[1] // used.get("expert", 1))
    held = math.prod(local)
    whole_matrices = optimizer != "adamw" and is_matrix(name, shape)
    if mesh.weights == "sharded" and "data" in used and _is_sliced(name, shape):
        layers = local[0] if of_layer else 1
        per_layer = math.prod(local) // layers
        piece = -(-per_layer // used["data"])
        part = -(-layers // used["data"]) * per_layer if whole_matrices else layers * piece
        return DeviceWeight(shape=shape, rest=layers * piece, part=part, used=held, gathered=per_layer)
    part = held
    if mesh.optimizer == "sharded":
        candidates = {axis: size for axis, size in used.items() if axis != "pipe"}
        if name.startswith(EXPERTS):
            candidates.pop("expert", None)
        stack = stack_dims(name) if whole_matrices else len(shape)
        part = _dealt(tuple(local), candidates, stack) if stack else held
    return DeviceWeight(shape=shape, rest=held, part=part, used=held, gathered=0)


def _is_sliced(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is cut into slices where dense weights are: arrays of more than one dimension a layer."""
    flat = len(shape) - name.startswith("layers.") < 2
    return not flat and not name.startswith(EXPERTS) and (not is_matrix(name, shape) or stack_dims(name) == 1)


def _dealt(shape: tuple[int, ...], sizes: dict[str, int], stack: int) -> int:
    """Elements of one rank's part when pieces are dealt out over as many axes as they are enough for."""
    pieces, ranks = math.prod(shape[:stack]), 1
    for size in sizes.values():
        if -(-pieces // (ranks * size)) * ranks * size <= MOST_PADDING * pieces:
            ranks *= size
    return -(-pieces // ranks) * math.prod(shape[stack:])
