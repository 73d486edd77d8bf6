"""Predicted steps whose channels or batch are split over workers."""

import dataclasses
import itertools

import jax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from experiments.perfmodel import reference
from experiments.perfmodel.reference import LABELS, Layer, Network
from experiments.perfmodel.split_step import predict_split_step
from jaxmotion import codecs, perfmodel, wire
from jaxmotion.perfmodel import predict_step, trace_step

BATCH, WIDTHS = 8, (24, 32, 64, 16)


def dense(params, x):
  return jax.nn.relu(x @ params["kernel"])


def cross_entropy(params, logits, labels):
  chosen = jax.nn.one_hot(labels, logits.shape[-1])
  return -(jax.nn.log_softmax(logits) * chosen).sum(-1).mean()


def network():
  layers = [
    Layer(
      f"dense{i}",
      dense,
      {"kernel": jax.ShapeDtypeStruct((a, b), "float32")},
      (i - 1,),  # the first one reads the images
      mixes=True,
    )
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS))
  ]
  last = Layer("loss", cross_entropy, {}, (len(layers) - 1, LABELS), True)
  return Network("mlp", (*layers, last), (WIDTHS[0],))


NET = network()
assert NET.layers[0].inputs == (reference.IMAGES,)
LINK = perfmodel.Link(latency_s=1e-5, rate=perfmodel.gbit_per_s(10))


def platform(data=4, model=2, **device):
  axes = (
    perfmodel.Axis(name="data", workers=data, link=LINK),
    perfmodel.Axis(name="model", workers=model, link=LINK),
  )
  base = perfmodel.builtin_platform("ethernet_10gbit")
  changed = dataclasses.replace(base.device, **device)
  return dataclasses.replace(base, axes=axes, device=changed, sources={})


def predict(cluster, batch=BATCH, *, data=False, model=False, **options):
  return predict_split_step(
    NET,
    batch,
    cluster,
    data_axis="data" if data else None,
    model_axis="model" if model else None,
    **options,
  )


def traced_bytes(workers):
  """Counts the bytes of the same network with channels split by hand."""

  def loss(params, images, labels):
    x = images
    for i, own in enumerate(params, 1):
      y = dense(own, x)
      options = {"to": "invarying"} if i == len(params) else {}
      x = lax.all_gather(y, "model", axis=y.ndim - 1, tiled=True, **options)
    return cross_entropy({}, x, labels)

  mesh = AbstractMesh((workers,), ("model",), axis_types=(AxisType.Auto,))
  split = [{"kernel": P(None, "model")}] * 3
  step = jax.shard_map(
    jax.grad(loss), mesh=mesh, in_specs=(split, P(), P()), out_specs=split
  )
  params = [layer.params for layer in NET.layers[:-1]]
  return wire.step_bytes(step, params, *NET.batch(BATCH))


@pytest.mark.parametrize("workers", [1, 4])
def test_split_channels_send_what_the_traced_program_sends(workers):
  step = predict(platform(model=workers), model=True)
  assert step.wire_bytes == traced_bytes(workers).total_bytes
  hidden = sum(WIDTHS[1:3]) * BATCH * 4
  share = (workers - 1) / workers
  logits = WIDTHS[3] * BATCH * 4
  assert step.wire_bytes == share * (2 * hidden + logits)


def test_split_channels_divide_matmuls_and_parameters():
  one, two = predict(platform()), predict(platform(model=2), model=True)
  assert one.wire_bytes == one.link_s == 0
  assert one.total_s == pytest.approx(one.compute_s + one.update_s)
  assert two.memory_bytes < one.memory_bytes

  def compute(workers, **device):
    return predict(platform(model=workers, **device), model=True).compute_s

  # Workers divide everything but the loss, which each of them computes.
  fast = {"kernel_s": 0.0, "memory_rate": perfmodel.gbyte_per_s(1e5)}
  assert compute(1, **fast) / compute(8, **fast) > 4
  # More workers than channels leave some idle.
  assert compute(48) > compute(64) == compute(4096)


def test_an_axis_of_one_worker_changes_nothing():
  options = {"data": True, "codec": codecs.uniform(bits=8), "bucket_bytes": 1}
  both = platform(data=4, model=1)
  assert predict(both, model=True, **options) == predict(both, **options)
  both = platform(data=1, model=4)
  alone = predict(both, model=True)
  hybrid = predict(both, data=True, model=True)
  assert hybrid.total_s == pytest.approx(alone.total_s)
  assert hybrid.wire_bytes == alone.wire_bytes


def test_hybrid_exchanges_the_gradients_of_split_parameters():
  cluster = platform(data=4, model=2)
  step = predict(cluster, data=True, model=True)
  split = predict(cluster, BATCH // 4, model=True)
  grads = 2 * 3 / 4 * 4 * NET.size / 2
  assert step.wire_bytes == split.wire_bytes + grads
  assert step.compute_s == split.compute_s


def test_data_parallel_layers_are_near_the_whole_network():
  net = reference.reference_network("resnet18")
  cluster = perfmodel.builtin_platform("ethernet_10gbit").resize(data=4)
  layers = predict_split_step(
    net, 32, cluster, data_axis="data", bucket_bytes=1 << 22
  )
  whole = predict_step(
    trace_step(net.loss, net.params, net.batch(8)),
    cluster,
    "data",
    bucket_bytes=1 << 22,
  )
  assert layers.wire_bytes == whole.wire_bytes
  assert layers.compute_s == pytest.approx(whole.compute_s, rel=0.1)
  assert layers.total_s == pytest.approx(whole.total_s, rel=0.1)


@pytest.mark.parametrize("codec", [None, codecs.uniform(bits=8)], ids=str)
def test_overlapping_is_never_slower(codec):
  options = {"data": True, "model": True, "codec": codec, "bucket_bytes": 1}
  beside, after = (
    predict(platform(), overlap=overlap, **options) for overlap in (True, False)
  )
  assert beside.total_s < after.total_s


def test_compressed_activations_send_fewer_bytes():
  int8 = codecs.uniform(bits=8, block=64)
  plain, coded = (
    predict(platform(model=4), model=True, activation_codec=codec)
    for codec in (None, int8)
  )
  assert 3 < plain.wire_bytes / coded.wire_bytes < 4
  assert plain.encode_s == plain.decode_s == 0
  assert coded.encode_s > 0 and coded.decode_s > 0
  assert coded.link_s < plain.link_s


def test_invalid_arguments_are_refused():
  with pytest.raises(ValueError, match="`model_axis` must be another"):
    predict_split_step(
      NET, BATCH, platform(), data_axis="data", model_axis="data"
    )
  with pytest.raises(ValueError, match="`batch` must be a multiple of the 4"):
    predict(platform(), 7, data=True)
  with pytest.raises(ValueError, match="`name` must be one of 'data', 'model'"):
    predict_split_step(NET, 8, platform(), data_axis="host")
