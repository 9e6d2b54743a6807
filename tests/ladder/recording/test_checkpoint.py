import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rungwise.ladder.recording.checkpoint import Checkpoints

STATE = {
    "params": {"w": jnp.array([jnp.nan, -0.0, 1e-42, jnp.inf]), "half": jnp.array([1.0, jnp.nan, -0.0], jnp.bfloat16)},
    "count": jnp.asarray(7, jnp.int32),
    "router_bias": jnp.array([-0.03, 0.03]),
    "empty": jnp.zeros((0, 3)),
    "host": np.array([-0.0, 1 / 3]),
    "key": jax.random.key_data(jax.random.key(3)),
}
META = {"tokens": 640, "data_position": [3, 17], "config_hash": "c0ffee", "corpus_hash": "beef", "jax": jax.__version__}


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def assert_bitwise(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def shifted(step: int):
    return STATE | {"count": jnp.asarray(step, jnp.int32)}


@pytest.fixture
def saved(tmp_path) -> Checkpoints:
    """Whole checkpoints at steps 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        checkpoints.save(step, shifted(step), meta=META)
    return checkpoints


def test_checkpoint_comes_back_bit_for_bit_with_its_meta(saved):
    step, tree, meta = saved.restore(abstract(STATE))
    assert step == 20
    assert_bitwise(tree, shifted(20))
    assert meta == META
    assert_bitwise(saved.restore(STATE, 10)[1], shifted(10))


def test_checkpoint_router_bias_routes_as_before(saved):
    scores = jnp.array([[0.6, 0.58], [0.66, 0.55], [0.52, 0.57]])
    bias = saved.restore(abstract(STATE))[1]["router_bias"]
    assert jnp.argmax(scores + bias, axis=1).tolist() == [1, 0, 1]
    assert jnp.argmax(scores, axis=1).tolist() == [0, 0, 1]


def test_checkpoint_optimizer_goes_on_as_if_never_stopped(tmp_path):
    optimizer = optax.adam(1e-2, b1=0.9, b2=0.95, eps=0.0)
    parameters = {"w": jnp.ones(3)}
    gradient = {"w": jnp.ones(3)}

    def steps(state, count):
        for _ in range(count):
            updates, inner = optimizer.update(gradient, state[1], state[0])
            assert np.allclose(jax.tree.leaves(updates)[0], -1e-2, rtol=1e-5)
            state = optax.apply_updates(state[0], updates), inner
        return state

    start = (parameters, optimizer.init(parameters))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, steps(start, 2), meta={})
    assert_bitwise(steps(checkpoints.restore(abstract(start))[1], 2), steps(start, 4))


def test_checkpoint_goes_where_the_leaf_is_sharded(saved):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    target = abstract(STATE) | {"router_bias": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=sharding)}
    assert saved.restore(target)[1]["router_bias"].sharding == sharding


def test_checkpoint_keeps_the_latest_and_replaces_its_own_step(saved):
    for step in (30, 30, 40):
        saved.save(step, shifted(step), meta={})
    assert saved.steps() == (30, 40)
    assert sorted(os.listdir(saved.folder)) == ["30", "40"]
    with pytest.raises(ValueError, match="keep 0"):
        Checkpoints(saved.folder, keep=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"router_bias": jax.ShapeDtypeStruct((4,), jnp.float32)},
            r"'router_bias' holds float32\[2\] but float32\[4\]",
        ),
        ({"count": jax.ShapeDtypeStruct((), jnp.uint32)}, r"'count' holds int32\[\] but uint32\[\]"),
        ({"params": {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}}, "'params.half' holds bfloat16.* but nothing"),
        ({"more": jax.ShapeDtypeStruct((1,), jnp.float32)}, "'more' holds nothing but float32"),
        ({"count": 7}, "'count' is a int, not an array"),
    ],
)
def test_checkpoint_of_another_tree_names_the_field(saved, change, message):
    with pytest.raises(ValueError, match=message) as raised:
        saved.restore(abstract(STATE) | change)
    assert "\n" not in str(raised.value)


def test_checkpoint_with_a_truncated_file_stops_with_its_name(saved):
    shutil.copytree(saved.folder / "20", saved.folder / "40")
    victim = max((saved.folder / "40").rglob("d/*"), key=lambda path: path.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"40/.* is damaged; remove .*40 to resume from step 20") as raised:
        saved.restore(abstract(STATE))
    assert str(victim) in str(raised.value)
    victim.unlink()
    with pytest.raises(ValueError, match="is missing"):
        saved.restore(abstract(STATE))
    shutil.rmtree(saved.folder / "40")
    assert saved.restore(abstract(STATE))[0] == 20


def test_checkpoint_none_whole_stops_and_says_what_was_cut_off(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert (checkpoints.latest_step(), checkpoints.steps(), checkpoints.unfinished_steps()) == (None, (), ())
    (tmp_path / "30").mkdir()
    assert (checkpoints.latest_step(), checkpoints.unfinished_steps()) == (None, (30,))
    with pytest.raises(ValueError, match=r"no whole checkpoint \(cut off while saving: 30\)"):
        checkpoints.restore(abstract(STATE))


KILLED_SAVE = """
import os, signal, sys, threading, time
from pathlib import Path
import jax.numpy as jnp
import orbax.checkpoint as ocp
from rungwise.ladder.recording import checkpoint

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def kill_between_files(folder):
    while sum(path.is_file() for path in Path(folder).rglob(".draft-30/**/*")) < 3:
        time.sleep(0.0005)
    kill()

folder, moment = sys.argv[1:]
if moment == "before the first file":
    ocp.Checkpointer.save = kill
elif moment == "between files":
    threading.Thread(target=kill_between_files, args=[folder], daemon=True).start()
elif moment == "before the manifest":
    checkpoint.write_json = kill
elif moment == "before the rename":
    Path.rename = kill
tree = {f"w{i}": jnp.full((200, 200), i, jnp.float32) for i in range(60)}
checkpoint.Checkpoints(folder, keep=1).save(30, tree, meta={})
"""
MOMENTS = ["before the first file", "between files", "before the manifest", "before the rename"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_checkpoint_killed_while_saving_is_never_taken(saved, moment):
    child = subprocess.run([sys.executable, "-P", "-c", KILLED_SAVE, saved.folder, moment], check=False)
    assert child.returncode == -signal.SIGKILL
    assert (saved.latest_step(), saved.unfinished_steps()) == (20, (30,))
    assert_bitwise(saved.restore(abstract(STATE))[1], shifted(20))
    saved.save(30, shifted(30), meta={})
    assert (saved.steps(), saved.unfinished_steps()) == ((20, 30), ())


def test_checkpoint_says_nothing_on_its_own(tmp_path):
    script = """
import sys, jax.numpy as jnp
from rungwise.ladder.recording.checkpoint import Checkpoints
checkpoints, tree = Checkpoints(sys.argv[1]), {"w": jnp.ones(3)}
for step in (1, 2, 3):
    checkpoints.save(step, tree, meta={})
checkpoints.restore(tree)
"""
    child = subprocess.run([sys.executable, "-P", "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert (child.stdout, child.stderr) == ("", "")
