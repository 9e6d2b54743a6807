"""On which devices a run's steps run, and how its state lies on them. Trainer and Evaluator know no more than this.

A state is opaque to whoever holds it: an engine makes it, steps it, and turns it into the tree that checkpoints hold,
which is the same for every engine, so that a run may be resumed under another topology.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Float, Int

from rungwise.ladder.family import RunConfig
from rungwise.ladder.training.schedule import Horizon
from rungwise.ladder.training.step import (
    StepFigures,
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    state_to_tree,
    tree_to_state,
)

Tree = dict[str, Any]
Step = Callable[[Any, Int[np.ndarray, "batch tokens"], Horizon], tuple[Any, StepFigures]]
"""(state, tokens [batch, seq + 1], horizon) → (state after, figures); the state given is used up."""
EvalStep = Callable[[Any, Int[np.ndarray, "batch tokens"]], Float[np.ndarray, " batch"]]
"""(state, tokens [batch, seq + 1]) → mean loss of each sequence, nats per token."""


class Engine(Protocol):
    """Devices a run's state lives on. Steps of any config with the same parameters may be compiled on one engine."""

    @property
    def devices(self) -> str:
        """What the journal says of the devices, such as `cpu`."""
        ...

    def init_state(self) -> Any:
        """State before the first step."""
        ...

    def abstract_tree(self) -> Tree:
        """Shapes, types and places of what `from_tree` takes: the target of a restore."""
        ...

    def to_tree(self, state: Any) -> Tree:
        """The state as plain dicts of arrays, the same shapes on every engine."""
        ...

    def from_tree(self, tree: Tree) -> Any:
        """Inverse of `to_tree`."""
        ...

    def compile_step(
        self, config: RunConfig, state: Any, tokens: Int[np.ndarray, "batch tokens"], horizon: Horizon
    ) -> Step:
        """The training step of `config`, the run's own or a variant with the same parameters, ready to run."""
        ...

    def eval_step(self, config: RunConfig, *, dropping: bool = False) -> EvalStep:
        """The evaluation step, dropless or through the training transport, compiled at its first call."""
        ...


class OneDevice:
    """Everything on the default device; ranks that share experts are virtual."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._like: TrainState = jax.eval_shape(lambda: init_state(config))
        self.devices = jax.devices()[0].platform

    def init_state(self) -> TrainState:
        return jax.jit(lambda: init_state(self._config))()  # one program to compile instead of one an array

    def abstract_tree(self) -> Tree:
        return state_to_tree(self._like)

    def to_tree(self, state: TrainState) -> Tree:
        return state_to_tree(state)

    def from_tree(self, tree: Tree) -> TrainState:
        return tree_to_state(tree, self._like)

    def compile_step(self, config: RunConfig, state: TrainState, tokens: np.ndarray, horizon: Horizon) -> Step:
        return jax.jit(make_train_step(config), donate_argnums=0).lower(state, tokens, horizon).compile()

    def eval_step(self, config: RunConfig, *, dropping: bool = False) -> EvalStep:
        step = jax.jit(make_eval_step(config, dropping=dropping))
        return lambda state, tokens: np.asarray(step(state, tokens))


def build_engine(config: RunConfig) -> Engine:
    """The engine a run's config asks for.

    Raises:
        ValueError: the mesh needs more devices than there are.
    """
    if config.mesh.num_devices == 1 and config.mesh.offload == "nothing" and jax.process_count() == 1:
        return OneDevice(config)
    from rungwise.ladder.mesh.mesh_engine import MeshEngine

    return MeshEngine(config)
