"""What a training step knows of where parameters lie: all here, or parts of them on the ranks of a mesh.

`mesh/mesh_layout.py` is the layout of a mesh.
"""

from typing import Protocol

from rungwise.comm.mesh import Axes
from rungwise.ladder.training.parameter_groups import Tree, whole


class Layout(Protocol):
    """What a rank holds of every parameter and of the optimizer's state. Trees are named like the parameters."""

    def spread(self, name: str) -> Axes:
        """Axes over which the parts of a parameter lie."""
        ...

    def reduce(self, grads: Tree) -> Tree:
        """This rank's parts of the sum of all ranks' gradients."""
        ...

    def own(self, params: Tree) -> Tree:
        """This rank's parts of the parameters."""
        ...

    def gather(self, parts: Tree) -> Tree:
        """Inverse of `own`."""
        ...

    def gather_weights(self, prefix: str, weights: Tree) -> Tree:
        """Weights made whole where they lie in slices: of one layer (`layers.`), or those outside layers (empty)."""
        ...


class Everything:
    """One device: all of everything."""

    spread = staticmethod(whole)

    def reduce(self, grads: Tree) -> Tree:
        return grads

    def own(self, params: Tree) -> Tree:
        return params

    def gather(self, parts: Tree) -> Tree:
        return parts

    def gather_weights(self, prefix: str, weights: Tree) -> Tree:
        return weights


EVERYTHING = Everything()
