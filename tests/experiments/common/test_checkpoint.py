import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from experiments.common.checkpoint import CheckpointStore, Log, Run, Workdir

RUN = Run(
  "int8",
  0,
  score=97.5,
  loss=0.1,
  wire_bytes=10,
  compiled_bytes=10,
  compile_s=1.0,
  step_ms=1.5,
)


def test_nothing_saved_leaves_everything_as_it_was(tmp_path):
  store = CheckpointStore(tmp_path)
  tree = {"a": jnp.ones(3)}
  restored, log = store.restore(tree)
  store.close()
  assert restored is tree
  assert log == Log([], [])


def test_the_latest_state_comes_back_bit_for_bit(tmp_path):
  mesh = Mesh(jax.devices()[:2], ("data",))
  place = [NamedSharding(mesh, P("data")), NamedSharding(mesh, P())]
  # Words that are a NaN, a subnormal and a negative zero stay what they are.
  words = np.array([0x7FC01234, 1, 0x80000000, 0xFFFFFFFF], np.uint32)
  tree = (
    jax.device_put(words.view(np.float32), place[0]),
    {"count": jax.device_put(np.int32(7), place[1])},
  )
  log = Log([0.1, 1 / 3], [4.0, 5.0])
  store = CheckpointStore(tmp_path)
  store.save(jax.tree.map(jnp.zeros_like, tree), Log([0.1], [4.0]))
  store.save(tree, log)
  store.close()

  other = CheckpointStore(tmp_path)
  like = jax.tree.map(jnp.zeros_like, tree)
  restored, restored_log = other.restore(like)
  other.close()
  assert restored_log == log
  np.testing.assert_array_equal(np.asarray(restored[0]).view(np.uint32), words)
  assert restored[1]["count"] == 7
  for leaf, expected in zip(
    jax.tree.leaves(restored), jax.tree.leaves(like), strict=True
  ):
    assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)


def test_arrays_of_the_host_come_back_as_they_are(tmp_path):
  tree = {"count": np.int64(2**40), "curve": np.array([1.5, np.nan])}
  store = CheckpointStore(tmp_path)
  store.save(tree, Log([0.1], [4.0]))
  restored, _ = store.restore(tree)
  store.close()
  assert restored["count"].dtype == np.int64  # Which JAX would narrow.
  assert restored["count"] == 2**40
  np.testing.assert_array_equal(restored["curve"], tree["curve"])


def test_finished_runs_are_remembered(tmp_path, tiny):
  config = tiny("digits")
  Workdir(tmp_path, config).add_run(RUN)
  Workdir(tmp_path, config).add_run(RUN._replace(seed=1))
  assert Workdir(tmp_path, config).read_runs() == [RUN, RUN._replace(seed=1)]


def test_a_folder_of_another_configuration_is_refused(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits"))
  other = tiny("digits", learning_rate=0.5, steps=9)
  with pytest.raises(ValueError, match=r"differs in learning_rate, steps\.$"):
    Workdir(tmp_path, other)


def test_more_seeds_and_exchanges_may_be_added(tmp_path, tiny):
  Workdir(tmp_path, tiny("digits", seeds=(0,))).add_run(RUN)
  wider = tiny("digits", seeds=(0, 1), exchanges=("int8",))
  assert Workdir(tmp_path, wider).read_runs() == [RUN]
