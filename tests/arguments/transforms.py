"""Calls of the optax transformations and data-parallel steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmotion
from jaxmotion import codecs, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
PARAMS = {"w": np.zeros((4, 1), np.float32)}
BATCH = {"x": np.ones((4, 4), np.float32), "y": np.ones((4, 1), np.float32)}
CODEC = codecs.feedback(codecs.uniform(bits=8))


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def exchange(**options):
  return transforms.exchange("data", CODEC, **options)


def state_of(tx):
  """A state of the right shapes on no worker in particular."""
  init, _ = transforms.data_parallel(loss_fn, tx, MESH)
  like = jax.eval_shape(init, {"w": jnp.zeros((4, 1))})[1]
  return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)


def data_parallel(position):
  tx = optax.chain(exchange(), optax.sgd(0.1))
  return transforms.data_parallel(loss_fn, tx, MESH)[position]


def local_updates(position):
  def keyed_loss(params, batch, key=None):
    return loss_fn(params, batch)

  outer = optax.chain(exchange(), optax.sgd(0.1))
  return transforms.local_updates(
    keyed_loss, optax.sgd(0.1), outer, MESH, every=2
  )[position]


def stateful_loss(params, model_state, batch, key):
  noise = jax.random.normal(key, batch["y"].shape)
  return loss_fn(params, batch) + jnp.mean(noise), model_state + 1


def stateful(position):
  tx = optax.chain(exchange(), optax.sgd(0.1))
  return transforms.data_parallel(stateful_loss, tx, MESH, model_state="mean")[
    position
  ]


def fully_sharded(position):
  def keyed_loss(params, batch, key=None):
    return loss_fn(params, batch)

  return transforms.fully_sharded(keyed_loss, optax.sgd(0.1), MESH)[position]


def sharded_state():
  """A state of `SHARDED`, whose leaves of `PARAMS` all workers hold whole."""
  init, _ = transforms.data_parallel(loss_fn, SHARDED, MESH)
  like = jax.eval_shape(init, {"w": jnp.zeros((4, 1))})[1]
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


CAST = transforms.exchange("data", codecs.cast("bfloat16"))
SKIP = transforms.skip_nonfinite(optax.sgd(0.1), "data")

OWN = transforms.per_worker(optax.scale(0.5), "data")
SHARDED = transforms.sharded("data", optax.sgd(0.1), nonfinite="skip")
CLIP = transforms.clip_by_global_norm(1.0, "data")


@transforms.parallelize_step(MESH)
def train_step(params, opt_state, batch):
  loss, grads = jax.value_and_grad(loss_fn)(params, batch)
  updates, opt_state = BOUND.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


BOUND = transforms.bind_mesh(exchange(), MESH)

CALLS = {
  "transforms.sharded": Call(
    "data",
    optax.sgd(0.1),
    gradient_codec=CODEC,
    weight_codec=codecs.uniform(bits=4),
    nonfinite="skip",
    seed=1,
    local_axis="device",
    local_codec=codecs.uniform(bits=8),
    specs=jax.P(),
  ),
  "transforms.sharded -> init": Call(PARAMS, on=SHARDED.init, mesh=["data"]),
  "transforms.sharded -> update": Call(
    PARAMS,
    Lazy(lambda: sharded_state()),
    PARAMS,
    on=SHARDED.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.fully_sharded": Call(
    loss_fn,
    optax.sgd(0.1),
    jax.sharding.Mesh(np.array(jax.devices()[:2])[None], ("host", "device")),
    axis_name="host",
    weight_codec=codecs.uniform(bits=8),
    gradient_codec=codecs.uniform(bits=4),
    local_axis="device",
    local_codec=codecs.uniform(bits=8),
    regather="local",
    stacked="layers/",
    has_aux=True,
    model_state="mean",
    weight_fn=lambda batch: 1.0,
    microbatches=2,
    nonfinite="skip",
    specs=jax.P(),
  ),
  "transforms.fully_sharded -> init": Call(
    PARAMS, on=Lazy(lambda: fully_sharded(0)), traced=True
  ),
  "transforms.fully_sharded -> step": Call(
    PARAMS,
    Lazy(lambda: fully_sharded(0)({"w": jnp.zeros((4, 1))})[1]),
    BATCH,
    key=np.zeros(2, np.uint32),
    on=Lazy(lambda: fully_sharded(1)),
    traced=True,
  ),
  "transforms.gather_params": Call(PARAMS),
  "transforms.gather_block": Call(loss_fn, regather=False),
  "transforms.WeightPart.gather_whole": Call(
    on=transforms.WeightPart(
      np.ones((2, 4), np.float32),
      None,
      None,
      transforms.GradientGuard(None, None),
      transforms.GatherOptions("data", -2, None, None),
    ).gather_whole,
    mesh=["data"],
  ),
  "transforms.clip_by_global_norm": Call(1.0, "data"),
  "transforms.clip_by_global_norm -> update": Call(
    PARAMS,
    optax.EmptyState(),
    on=CLIP.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.bind_mesh": Call(exchange(), MESH),
  "transforms.bind_mesh -> init": Call(PARAMS, on=BOUND.init, traced=True),
  "transforms.parallelize_step": Call(
    MESH,
    batch=("batch",),
    mean=("batch_stats",),
    static_argnames=("train",),
    static_argnums=(3,),
    donate_argnames=("params",),
    donate_argnums=(1,),
  ),
  "transforms.parallelize_step -> decorate": Call(
    loss_fn, on=transforms.parallelize_step(MESH)
  ),
  "transforms.parallelize_step -> step": Call(
    PARAMS,
    Lazy(lambda: state_of(exchange())),
    BATCH,
    on=train_step,
    traced=True,
  ),
  "transforms.exchange": Call(
    "data",
    CODEC,
    method=None,
    nonfinite="skip",
    seed=1,
    start=2,
    local_axis="device",
    specs=jax.P(),
  ),
  "transforms.exchange -> init": Call(
    PARAMS, on=exchange().init, mesh=["data"]
  ),
  "transforms.exchange -> update": Call(
    PARAMS,
    Lazy(lambda: CAST.init({"w": jnp.zeros((4, 1))})),
    on=CAST.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.skip_nonfinite": Call(optax.sgd(0.1), "data", wait=True),
  "transforms.skip_nonfinite -> init": Call(
    PARAMS, on=SKIP.init, mesh=["data"]
  ),
  "transforms.skip_nonfinite -> update": Call(
    PARAMS,
    Lazy(lambda: SKIP.init(jax.tree.map(jnp.asarray, PARAMS))),
    on=SKIP.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.per_worker": Call(optax.trace(0.9), "data"),
  "transforms.per_worker -> init": Call(PARAMS, on=OWN.init, mesh=["data"]),
  "transforms.per_worker -> update": Call(
    PARAMS,
    transforms.PerWorkerState(jaxmotion.PerWorker(optax.ScaleState())),
    on=OWN.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.local_value_and_grad": Call(loss_fn, "data"),
  "transforms.local_value_and_grad -> grad": Call(
    PARAMS,
    BATCH,
    on=transforms.local_value_and_grad(loss_fn, "data"),
    mesh=["data"],
    varying=["args"],
  ),
  "transforms.data_parallel": Call(
    loss_fn, exchange(), MESH, weight_fn=lambda batch: 1.0
  ),
  "transforms.local_updates": Call(
    loss_fn,
    optax.sgd(0.1),
    exchange(),
    MESH,
    every=4,
    fragments=2,
    weight_fn=lambda batch: 1.0,
    parts=lambda path, shape: 0,
  ),
  "transforms.local_updates -> init": Call(
    PARAMS, on=Lazy(lambda: local_updates(0)), traced=True
  ),
  "transforms.local_updates -> step": Call(
    Lazy(
      lambda: jax.tree.map(
        lambda a: np.zeros(a.shape, a.dtype),
        jax.eval_shape(local_updates(0), {"w": jnp.zeros((4, 1))}),
      )
    ),
    BATCH,
    key=np.zeros(2, np.uint32),
    on=Lazy(lambda: local_updates(1)),
    traced=True,
  ),
  "transforms.init_state": Call(exchange(), PARAMS, MESH),
  "transforms.extend.trace_state": Call(exchange(), PARAMS, MESH, "data"),
  "transforms.data_parallel -> init": Call(
    PARAMS, on=Lazy(lambda: data_parallel(0)), traced=True
  ),
  "transforms.data_parallel -> step": Call(
    PARAMS,
    Lazy(lambda: state_of(optax.chain(exchange(), optax.sgd(0.1)))),
    BATCH,
    on=Lazy(lambda: data_parallel(1)),
    traced=True,
  ),
  "transforms.data_parallel -> init with model_state": Call(
    PARAMS, np.zeros(2, np.float32), on=Lazy(lambda: stateful(0)), traced=True
  ),
  "transforms.data_parallel -> step with model_state": Call(
    PARAMS,
    np.zeros(2, np.float32),
    Lazy(lambda: state_of(optax.chain(exchange(), optax.sgd(0.1)))),
    BATCH,
    key=np.zeros(2, np.uint32),
    on=Lazy(lambda: stateful(1)),
    traced=True,
  ),
}
UNCALLED = {
  "transforms.WeightPart": "`fully_sharded` makes it",
  "transforms.extend.*": "the steps of two rooms have checked the arguments",
}
_LATER = {"misspelt": "no mesh is known here; a step names the axis"}


def accept_options(name):
  """What the arguments of `jax.jit` may be, before a step is known."""
  names = {"misspelt": "no step is known here", "empty": "there is none"}
  numbers = {
    "minus_one": "the last parameter",
    "zero": "the first parameter",
    "empty": "there is none",
  }
  return {
    (name, f"{kind}_{suffix}"): accepted
    for kind in ("static", "donate")
    for suffix, accepted in (("argnames", names), ("argnums", numbers))
  }


ACCEPTED = {
  ("transforms.local_updates", "mix"): {"zero": "nothing of a worker's own"},
  ("transforms.parallelize_step", "batch"): {
    "misspelt": "no step is known here"
  },
  ("transforms.parallelize_step", "mean"): {"empty": "nothing is averaged"},
  **accept_options("transforms.parallelize_step"),
  ("transforms.exchange", "axis_name"): _LATER,
  ("transforms.exchange", "local_axis"): _LATER,
  ("transforms.per_worker", "axis_name"): _LATER,
  ("transforms.sharded", "axis_name"): _LATER,
  ("transforms.fully_sharded", "stacked"): {
    "misspelt": "no parameters are known here; `init` matches it"
  },
  ("transforms.sharded", "local_axis"): _LATER,
  ("transforms.clip_by_global_norm", "axis_name"): _LATER,
  ("transforms.skip_nonfinite", "axis_name"): _LATER,
  ("transforms.local_value_and_grad", "axis_name"): _LATER,
}
# Arguments that only the caller's loss function and optax look into.
KNOWN_BAD = {
  ("transforms.parallelize_step -> step", "params"),
  ("transforms.parallelize_step -> step", "opt_state"),
  ("transforms.parallelize_step -> step", "batch"),
  ("transforms.local_value_and_grad -> grad", "params"),
  ("transforms.local_value_and_grad -> grad", "args"),
  ("transforms.fully_sharded -> step", "params"),
  ("transforms.fully_sharded -> step", "batch"),
  ("transforms.local_updates -> step", "batch"),
  ("transforms.data_parallel -> step", "params"),
  ("transforms.data_parallel -> step", "opt_state"),
  ("transforms.data_parallel -> step", "batch"),
  ("transforms.data_parallel -> step with model_state", "params"),
  ("transforms.data_parallel -> step with model_state", "opt_state"),
  ("transforms.data_parallel -> step with model_state", "model_state"),
  ("transforms.data_parallel -> step with model_state", "batch"),
}
