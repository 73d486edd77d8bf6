import os
import resource
import shutil
import signal
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import (
  Mesh,
  NamedSharding,
  PartitionSpec as P,
  SingleDeviceSharding,
)

from experiments.common import checkpoint
from experiments.common.checkpoint import (
  NAME,
  BrokenFileError,
  CheckpointStore,
  Elastic,
  Log,
  check_manifest,
  remove_folder,
  write_manifest,
)
from experiments.common.console import JobError

TREE = {"w": np.arange(6, dtype=np.float32), "count": np.int32(3)}
LOGS = Log([0.5], [1.0]), Log([0.5, 1 / 3], [1.0, 2.0])
# Words that are a NaN, a subnormal and a negative zero stay what they are.
WORDS = np.array([0x7FC01234, 1, 0x80000000, 0xFFFFFFFF], np.uint32)


def make_leaves():
  """One leaf of every dtype, shape and memory."""
  mesh = Mesh(jax.devices()[:2], ("data",))
  split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
  device = jax.devices()[1]
  pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
  return [
    jax.device_put(WORDS.view(np.float32), split),
    {"count": jax.device_put(np.int32(7), whole)},
    np.int64(2**40),  # Which JAX would narrow.
    np.array([1.5, np.nan]),
    np.array([True, False]),
    np.zeros((0, 3), np.uint8),
    np.array([1.5, -0.0], ml_dtypes.bfloat16),
    np.array([3, -4], ml_dtypes.int4),
    jnp.array([3, 0.5], ml_dtypes.float8_e4m3fn),
    jnp.zeros((2, 0)),
    jax.device_put(np.float16(2), pinned),
    jax.device_put(np.asfortranarray(np.arange(6).reshape(2, 3)), device),
    jax.random.key(3),
    jax.device_put(jax.random.split(jax.random.key(4, impl="rbg"), 2), split),
  ]


def test_every_dtype_shape_and_memory_of_the_latest_state_comes_back(tmp_path):
  tree = make_leaves()
  store = CheckpointStore(tmp_path)
  restored, log = store.restore(tree)
  assert restored is tree and log == Log([], [])  # Nothing is saved.
  store.save(tree[:1], LOGS[0])
  store.save(tree, LOGS[1])
  restored, log = CheckpointStore(tmp_path).restore(tree)
  assert log == LOGS[1]
  leaves = zip(jax.tree.leaves(restored), jax.tree.leaves(tree), strict=True)
  for found, expected in leaves:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if isinstance(expected, jax.Array):
      assert found.sharding.is_equivalent_to(expected.sharding, found.ndim)
      assert found.sharding.memory_kind == expected.sharding.memory_kind
    elif found.ndim:
      assert found.flags.writeable
    if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
      found, expected = map(jax.random.key_data, (found, expected))
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_a_state_without_elements_is_saved_with_its_log(tmp_path):
  store = CheckpointStore(tmp_path)
  store.save([np.zeros((0, 2))], LOGS[0])
  place = SingleDeviceSharding(jax.devices()[1])
  shape = jax.ShapeDtypeStruct((0, 2), np.float64, sharding=place)
  restored, log = store.restore([shape])
  assert restored[0].shape == (0, 2) and log == LOGS[0]


@pytest.fixture
def saved(tmp_path):
  """A run with the checkpoints of two steps."""
  store = CheckpointStore(tmp_path / "run")
  for log in LOGS:
    store.save(scale(TREE, len(log.loss)), log)
  return store, tmp_path / "run"


def scale(tree, factor):
  return {name: x * x.dtype.type(factor) for name, x in tree.items()}


def assert_step(found, step):
  tree, log = found
  assert log == LOGS[step - 1]
  for name, expected in scale(TREE, step).items():
    np.testing.assert_array_equal(tree[name], expected)


def files_of(folder):
  return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_checkpoint_with_a_flipped_bit_is_refused_by_name(saved, capsys):
  store, folder = saved
  random = np.random.default_rng(0)
  paths = files_of(folder / "2")
  assert len(paths) > 8
  for path in paths:
    whole = bytearray(path.read_bytes())
    bit = int(random.integers(8 * len(whole)))
    whole[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(whole)
    assert_step(store.restore(TREE), 1)
    said = capsys.readouterr().err
    assert said == (
      f"Checkpoint {folder / '2'} is broken:"
      f" {path.relative_to(folder / '2')} does not match its checksum."
      " The run goes on from step 1.\n"
      "run: resumed from step 1.\n"
    )
    (folder / "2.broken").rename(folder / "2")
    whole[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(whole)
  assert_step(store.restore(TREE), 2)


def test_a_run_without_a_whole_checkpoint_starts_again_and_says_so(
  saved, capsys
):
  store, folder = saved
  for step in (1, 2):
    (folder / str(step) / checkpoint.NAME).write_bytes(b"")
  restored, log = store.restore(TREE)
  assert restored is TREE
  assert log == Log([], [])
  assert "The run goes on from step 0." in capsys.readouterr().err
  for later in LOGS:  # Broken folders do not stand in the way.
    store.save(scale(TREE, len(later.loss)), later)
  assert_step(store.restore(TREE), 2)


def test_what_killed_jobs_left_is_no_checkpoint_and_is_removed(saved):
  store, folder = saved
  for name in ("3.partial-77", "3.partial-78.orbax-checkpoint-tmp", "1.old"):
    shutil.copytree(folder / "2", folder / name)
  assert_step(store.restore(TREE), 2)
  store.save(TREE, Log([0.5] * 3, [1.0] * 3))
  assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]


def test_times_of_files_decide_nothing(saved):
  store, folder = saved
  for future, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
    os.utime(path, (4e9 * future, 4e9 * future))
  assert_step(store.restore(TREE), 2)


def test_leaves_of_another_program_are_named(saved):
  store, _ = saved
  other = TREE | {"w": np.zeros(7, np.float32)}
  with pytest.raises(
    JobError, match=r"leaf 1 is float32\[6\], not float32\[7\]"
  ):
    store.restore(other)
  with pytest.raises(JobError, match=r"it has 2 leaves, not 1\."):
    store.restore([TREE["count"]])


def test_a_full_disk_ends_a_save_in_one_line_and_leaves_no_piece(saved, capfd):
  store, folder = saved
  noise = np.random.default_rng(0)  # It cannot be compressed.
  large = [noise.random(1 << 14) for _ in range(4)]
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
  before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  try:
    with pytest.raises(JobError, match=r"step 3 cannot be .*File too large"):
      store.save(large, Log([0.5] * 3, [1.0] * 3))
  finally:
    signal.signal(signal.SIGXFSZ, before)
    limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
  assert_step(store.restore(TREE), 2)
  assert capfd.readouterr().err == "run: resumed from step 2.\n"


def test_a_state_of_the_same_layout_is_not_resized(tmp_path):
  layout = {"workers": (("data", 2),)}  # Its tuples come back as lists.
  store = CheckpointStore(tmp_path)
  store.save(TREE, LOGS[0], layout)
  elastic = Elastic(layout, pytest.fail, pytest.fail)
  assert_step(store.restore(TREE, elastic), 1)


FILES = {"a": b"12345", "b/c": b"6", "b/empty": b""}


@pytest.fixture
def sealed(tmp_path):
  """A folder with a manifest."""
  folder = tmp_path / "4"
  for name, content in FILES.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
  write_manifest(folder, "4")
  return folder


def test_the_usual_program_reads_a_manifest(sealed):
  program = shutil.which("sha256sum") or shutil.which("gsha256sum")
  assert program
  command = [program, "--check", "--strict", f"4/{NAME}"]
  done = subprocess.run(
    command, cwd=sealed.parent, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [f"4/{name}: OK" for name in FILES]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda folder: (folder / "b/empty").unlink(), "b/empty is missing"),
    (
      lambda folder: (folder / "b/d").write_bytes(b""),
      "b/d is not in SHA256SUMS",
    ),
    (lambda folder: (folder / NAME).unlink(), "SHA256SUMS: No such file"),
  ],
)
def test_a_file_less_or_more_is_named(sealed, change, message):
  change(sealed)
  with pytest.raises(BrokenFileError, match=message):
    check_manifest(sealed)


def test_a_folder_with_another_name_is_refused(sealed):
  other = sealed.rename(sealed.parent / "5")
  with pytest.raises(BrokenFileError, match="is of another checkpoint"):
    check_manifest(other)


def test_a_removed_folder_is_gone_and_an_absent_one_is_no_error(sealed):
  remove_folder(sealed)
  assert not sealed.exists()
  remove_folder(sealed)
