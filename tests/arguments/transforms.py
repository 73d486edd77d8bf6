"""Calls of the optax transformations, schemes and training steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmotion
from jaxmotion import HostAxes, codecs, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
PARAMS = {"w": np.zeros((4, 1), np.float32)}
BATCH = {"x": np.ones((4, 4), np.float32), "y": np.ones((4, 1), np.float32)}
ON_MESH = Lazy(lambda: jax.device_put(BATCH, jax.NamedSharding(MESH, jax.P())))
CODEC = codecs.feedback(codecs.uniform(bits=8))


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def exchange(**options):
  return transforms.exchange("data", CODEC, **options)


CHAIN = optax.chain(exchange(), optax.sgd(0.1))
STATS = np.zeros(2, np.float32)


def keyed_loss(params, batch, key=None):
  return loss_fn(params, batch)


def stateful_loss(params, model_state, batch, key):
  noise = jax.random.normal(key, batch["y"].shape)
  return loss_fn(params, batch) + jnp.mean(noise), model_state + 1


TRAININGS = {
  "chain": lambda: transforms.make_train_step(
    keyed_loss, CHAIN, MESH, weight_fn=lambda batch: 1.0, microbatches=2
  ),
  "model_state": lambda: transforms.make_train_step(
    stateful_loss, CHAIN, MESH, model_state="mean"
  ),
  "local_updates": lambda: transforms.make_train_step(
    keyed_loss, transforms.local_updates(optax.sgd(0.1), CHAIN, every=2), MESH
  ),
  "fully_sharded": lambda: transforms.make_train_step(
    keyed_loss, transforms.fully_sharded(optax.sgd(0.1)), MESH
  ),
}


def fill(like):
  """Zeros of the right shapes on no worker in particular."""
  return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), like)


@functools.cache
def state_of(training):
  """The state before the first step."""
  models = () if training != "model_state" else (jnp.asarray(STATS),)
  params = {"w": jnp.zeros((4, 1))}
  return fill(jax.eval_shape(TRAININGS[training]().init, params, *models))


@functools.cache
def opt_state_of(tx):
  """A state of an optax chain."""
  init, _ = transforms.make_train_step(loss_fn, tx, MESH)
  return fill(jax.eval_shape(init, {"w": jnp.zeros((4, 1))}).opt_state)


@functools.cache
def work_of(training):
  """What `step.compute` returns."""
  step = TRAININGS[training]().step
  batch = jax.tree.map(jnp.asarray, BATCH)
  return fill(jax.eval_shape(step.compute, state_of(training), batch))


def calls_of(training, **options):
  """Calls of the two functions that train by a scheme."""
  of = f"of {training}"
  models = () if training != "model_state" else (STATS,)
  return {
    f"transforms.make_train_step -> init {of}": Call(
      PARAMS, *models, on=Lazy(lambda: TRAININGS[training]().init)
    ),
    f"transforms.make_train_step -> step {of}": Call(
      Lazy(lambda: state_of(training)),
      BATCH,
      key=np.zeros(2, np.uint32),
      on=Lazy(lambda: TRAININGS[training]().step),
      **options,
    ),
  }


def calls_of_tx(name, tx, make_state=None, *params, varying=("updates",)):
  """Calls of the two functions of a transformation."""
  make_state = make_state or (lambda: tx.init({"w": jnp.zeros((4, 1))}))
  return {
    f"transforms.{name} -> init": Call(PARAMS, on=tx.init, mesh=["data"]),
    f"transforms.{name} -> update": Call(
      PARAMS,
      Lazy(make_state),
      *params,
      on=tx.update,
      mesh=["data"],
      varying=varying,
    ),
  }


CAST = transforms.exchange("data", codecs.cast("bfloat16"))
SKIP = transforms.skip_nonfinite(optax.sgd(0.1), "data")

OWN = transforms.per_worker(optax.scale(0.5), "data")
SHARDED = transforms.sharded("data", optax.sgd(0.1), nonfinite="skip")
CLIP = transforms.clip_by_global_norm(1.0, "data")
DELAYED = transforms.delayed(CAST)
BOUND = transforms.bind_mesh(exchange(), MESH)

GIVEN = {
  "axis_name": "data",
  "block": loss_fn,
  "codec": CODEC,
  "fun": loss_fn,
  "gradient_codec": CODEC,
  "inner": optax.sgd(0.1),
  "local_codec": codecs.uniform(bits=8),
  "loss_fn": loss_fn,
  "max_norm": 1.0,
  "mesh": MESH,
  "outer": exchange(),
  "params": PARAMS,
  "seed": 1,
  "tx": exchange(),
  "weight_codec": codecs.uniform(bits=4),
}
TWO_AXES = HostAxes("host", "device")
CALLS = {
  "transforms.sharded": Call(TWO_AXES, optax.sgd(0.1), nonfinite="skip"),
  **calls_of_tx(
    "sharded",
    SHARDED,
    lambda: jax.tree.map(jnp.asarray, opt_state_of(SHARDED)),
    PARAMS,
  ),
  "transforms.fully_sharded": Call(
    optax.sgd(0.1), regather="local", stacked="layers/", nonfinite="skip"
  ),
  "transforms.read_params": Call(Lazy(lambda: state_of("fully_sharded"))),
  "transforms.gather_block": Call(regather=False),
  "transforms.clip_by_global_norm -> update": Call(
    PARAMS,
    optax.EmptyState(),
    on=CLIP.update,
    mesh=["data"],
    varying=["updates"],
  ),
  "transforms.bind_mesh -> init": Call(on=BOUND.init),
  "transforms.exchange": Call(
    TWO_AXES, local_codec=None, nonfinite="skip", start=2
  ),
  **calls_of_tx("exchange", CAST),
  "transforms.skip_nonfinite": Call(wait=True),
  **calls_of_tx("skip_nonfinite", SKIP),
  **calls_of_tx(
    "per_worker",
    OWN,
    lambda: transforms.extend.PerWorkerState(
      jaxmotion.PerWorker(optax.ScaleState())
    ),
  ),
  "transforms.local_value_and_grad -> grad": Call(
    PARAMS,
    BATCH,
    on=transforms.local_value_and_grad(loss_fn, "data"),
    mesh=["data"],
    varying=["args"],
  ),
  "transforms.value_and_grad": Call(
    specs=jax.P("data"), gradient_codec=codecs.uniform(bits=8)
  ),
  "transforms.value_and_grad -> grad": Call(
    PARAMS, ON_MESH, on=transforms.value_and_grad(loss_fn), traced=False
  ),
  "transforms.grad": Call(argnums=(0, 1)),
  **calls_of_tx("delayed", DELAYED, varying=["updates", "state"]),
  "transforms.local_updates": Call(
    every=4, fragments=2, parts=lambda path, shape: 0
  ),
  "transforms.make_train_step": Call(
    scheme=CHAIN,
    has_aux=True,
    model_state="mean",
    weight_fn=lambda batch: 1.0,
    microbatches=2,
    specs=jax.P(),
    overlap="program",
  ),
  **calls_of("chain", counts=np.ones(2, np.int32)),
  **calls_of("model_state"),
  **calls_of("local_updates"),
  **calls_of("fully_sharded"),
  "transforms.make_train_step -> step.compute": Call(
    Lazy(lambda: state_of("chain")),
    BATCH,
    key=np.zeros(2, np.uint32),
    counts=np.ones(2, np.int32),
    on=Lazy(lambda: TRAININGS["chain"]().step.compute),
  ),
  "transforms.make_train_step -> step.update": Call(
    Lazy(lambda: state_of("chain")),
    Lazy(lambda: work_of("chain")),
    on=Lazy(lambda: TRAININGS["chain"]().step.update),
  ),
  "transforms.extend.trace_state": Call(),
}
UNCALLED = {
  "transforms.Scheme.*": "`make_train_step` calls them",
  "transforms.extend.*": "the steps of two rooms have checked the arguments",
}
_LATER = {"misspelt": "no mesh is known here; a step names the axis"}
ACCEPTED = {
  **{
    (f"transforms.{name}", "axis_name"): _LATER
    for name in """
    exchange per_worker sharded delayed clip_by_global_norm skip_nonfinite
    local_value_and_grad grad value_and_grad
    """.split()
  },
  ("transforms.local_updates", "mix"): {"zero": "nothing of a worker's own"},
  ("transforms.fully_sharded", "stacked"): {
    "misspelt": "no parameters are known here; `init` matches it"
  },
  ("transforms.grad", "argnums"): {"huge": "no call is known here"},
  ("transforms.value_and_grad", "argnums"): {"huge": "no call is known here"},
}
# Arguments that only the caller's loss function and optax look into.
KNOWN_BAD = {
  *(
    (f"transforms.{name}", argument)
    for name, arguments in {
      "local_value_and_grad -> grad": ("params", "args"),
      "value_and_grad -> grad": ("params", "batch"),
      "make_train_step -> step.compute": ("batch",),
    }.items()
    for argument in arguments
  ),
  *(
    (f"transforms.make_train_step -> step of {training}", "batch")
    for training in TRAININGS
  ),
}
