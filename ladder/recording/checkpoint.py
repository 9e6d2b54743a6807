"""Checkpoints: a training state on disk, whole or absent, bit for bit.

Orbax writes the arrays into a draft folder. The manifest follows: what the caller wants to know again, every
array's shape, every file's checksum. One rename then makes the draft a checkpoint; only after that are older
ones removed. Nothing else is ever taken for a checkpoint, wherever the folder was copied from. Several processes write
their arrays together; all else is the first one's.
"""

import contextlib
import logging
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from rungwise.ladder.console import one_line
from rungwise.ladder.home import make_folder, read_json, write_json
from rungwise.ladder.mesh.processes import on_first

_MANIFEST: Final = "manifest.json"
_ARRAYS: Final = "arrays"
_PROBE_BYTES: Final = 4096
_DRAFT: Final = ".draft-"
_OLD: Final = ".old-"


class CheckpointFailed(OSError):
    """A checkpoint could not be written; those before it are as they were."""


class Checkpoints:
    """The checkpoints of one run, each a folder named by its step.

    Args:
        keep: how many of the latest to keep.
        kept: steps whose checkpoints are kept for good, beside those.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, kept: Collection[int] = ()) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep} would remove every checkpoint; use 1 or more")
        self.folder = Path(folder)
        self.keep, self.kept = keep, frozenset(kept)

    def steps(self) -> tuple[int, ...]:
        """Steps of the whole checkpoints, ascending."""
        return tuple(sorted(int(path.name) for path in self._numbered() if (path / _MANIFEST).exists()))

    def latest_step(self) -> int | None:
        """Step of the latest whole checkpoint, None if there is none."""
        return max(self.steps(), default=None)

    def unfinished_steps(self) -> tuple[int, ...]:
        """Steps whose save was cut off: to be told to people, and replaced by the next save."""
        found = {int(path.name.removeprefix(_DRAFT)) for path in self._glob(f"{_DRAFT}*")}
        found |= {int(path.name) for path in self._numbered()} - set(self.steps())
        return tuple(sorted(found))

    def check_writable(self) -> None:
        """Writes and syncs a small nameless file where checkpoints will go.

        Raises:
            ValueError: that fails, as it would for every checkpoint.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ValueError(
                f"checkpoint folder {self.folder} cannot be written to ({error.strerror}): nothing trained would be"
                " kept; repair it or free space, or choose another home with --home"
            ) from error

    def save(self, step: int, tree: Any, *, meta: Mapping[str, Any]) -> None:
        """Write a checkpoint and return when it is whole; then remove those beyond `keep`.

        Args:
            tree: a pytree whose leaves are all arrays.
            meta: plain values to get back with it, such as the data position and hashes.
        Raises:
            ValueError: a leaf is no array.
            CheckpointFailed: the folder cannot be written to; what was there is as it was.
        """
        leaves = _named_leaves(tree)
        try:
            self._write(step, leaves, dict(meta))
        except (OSError, ValueError) as error:  # Orbax says ValueError where a disk is full
            raise CheckpointFailed(f"checkpoint of step {step} in {self.folder}: {one_line(error)}") from error

    def _write(self, step: int, leaves: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp

        draft = self.folder / f"{_DRAFT}{step}"
        on_first(lambda: self._begin(draft))
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            filled = {name: leaf for name, leaf in leaves.items() if leaf.size}  # Orbax refuses empty arrays
            checkpointer.save(draft / _ARRAYS, args=ocp.args.StandardSave(filled))
        on_first(lambda: self._finish(draft, step, leaves, meta))

    def _begin(self, draft: Path) -> None:
        make_folder(self.folder)
        self._remove_leftovers()
        draft.mkdir()

    def _finish(self, draft: Path, step: int, leaves: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Makes a draft with all its arrays a checkpoint, and removes those it makes superfluous."""
        manifest = {
            "step": step,
            "meta": meta,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "numpy": [name for name, leaf in leaves.items() if isinstance(leaf, np.ndarray)],
            "files": _checksums(draft / _ARRAYS),
        }
        write_json(draft / _MANIFEST, manifest)
        self._set_aside(self.folder / str(step))
        draft.rename(self.folder / str(step))
        _sync_folder(self.folder)
        for old in [old for old in self.steps() if old not in self.kept][: -self.keep]:
            self._set_aside(self.folder / str(old))
        self._remove_leftovers()

    def restore(self, abstract_tree: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """The checkpoint of `step`, else the latest: its step, the tree, and the meta saved with it.

        Args:
            abstract_tree: the tree expected, of `jax.ShapeDtypeStruct`s or arrays. A leaf's sharding, if it
                has one, says where its array goes; what was saved from NumPy comes back as NumPy.
        Raises:
            ValueError: there is no whole checkpoint, a file of it is damaged, or it holds another tree.
        """
        import jax
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        chosen = self.latest_step() if step is None else step
        if chosen is None or chosen not in self.steps():
            cut = ", ".join(map(str, self.unfinished_steps())) or "none"
            raise ValueError(
                f"{self.folder} has no whole checkpoint{'' if step is None else f' of step {step}'} "
                f"(cut off while saving: {cut}); train from the start in a new folder, or restore a copy"
            )
        place = self.folder / str(chosen)
        manifest = read_json(place / _MANIFEST)
        self._check_files(place, manifest["files"])
        wanted = _named_leaves(abstract_tree)
        _check_leaves(place, manifest["leaves"], {name: _describe(leaf) for name, leaf in wanted.items()})
        target = {
            name: _target(leaf, on_host=name in manifest["numpy"])
            for name, leaf in wanted.items()
            if math.prod(leaf.shape)
        }
        with _quiet(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(place / _ARRAYS, args=ocp.args.StandardRestore(target))
        leaves = [found[name] if name in found else jnp.zeros_like(leaf) for name, leaf in wanted.items()]
        return chosen, jax.tree.unflatten(jax.tree.structure(abstract_tree), leaves), manifest["meta"]

    def _glob(self, pattern: str) -> Iterator[Path]:
        return self.folder.glob(pattern) if self.folder.exists() else iter(())

    def _numbered(self) -> list[Path]:
        return [path for path in self._glob("*") if path.name.isdecimal()]

    def _set_aside(self, place: Path) -> None:
        """Stop a folder from being a checkpoint at once; removing its files takes longer."""
        if place.exists():
            place.rename(place.with_name(_OLD + place.name))

    def _remove_leftovers(self) -> None:
        for name in (f"{_DRAFT}*", f"{_OLD}*"):
            for path in self._glob(name):
                shutil.rmtree(path)

    def _check_files(self, place: Path, expected: Mapping[str, list[int]]) -> None:
        found = _checksums(place / _ARRAYS)
        for name, checksum in expected.items():
            if found.get(name) != checksum:
                others = [other for other in self.steps() if str(other) != place.name]
                remedy = f"remove {place} to resume from step {others[-1]}" if others else "restore a copy"
                state = "damaged" if name in found else "missing"
                raise ValueError(f"checkpoint file {place / _ARRAYS / name} is {state}; {remedy}")


def _named_leaves(tree: Any) -> dict[str, Any]:
    import jax

    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not hasattr(leaf, "dtype") or name in named:
            problem = "occurs twice" if name in named else f"is a {type(leaf).__name__}, not an array"
            raise ValueError(f"checkpoint field {name!r} {problem}; make every leaf an array with a path of its own")
        named[name] = leaf
    return named


def _target(leaf: Any, *, on_host: bool) -> Any:
    """What Orbax shall make of an array: NumPy if it was that, else sharded like the leaf or on one device."""
    import jax

    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=None if on_host else sharding)


def _describe(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _check_leaves(place: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name in [*wanted, *saved]:
        if saved.get(name) != wanted.get(name):
            have, want = (
                f"{found[name][1]}{found[name][0]}" if name in found else "nothing" for found in (saved, wanted)
            )
            raise ValueError(
                f"checkpoint {place}: field {name!r} holds {have} but {want} is wanted; "
                "resume with the config it was saved by"
            )


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of every file below a folder."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found[str(path.relative_to(folder))] = [len(data), zlib.crc32(data)]
    return found


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's progress reports off standard error."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
