"""Published algorithms, set up from the parts of this library.

Each docstring names the paper, and says where ours differs. All are used like
this:

  >>> import jax, jax.numpy as jnp, optax
  >>> from jaxmotion import make_train_step, presets
  >>> tx = optax.chain(presets.dgc("data", clip_norm=None), optax.sgd(0.5))
  >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
  >>> init, step = make_train_step(lambda w, x: jnp.mean(x @ w), tx, mesh)
  >>> state, loss = step(init(jnp.ones((4, 1))), jnp.ones((2, 4)))
  >>> state.params.tolist()
  [[0.5], [0.5], [0.5], [0.5]]

Presets that take a `learning_rate` after the axis are whole optimizers, with
the exchange inside. These arguments are those of several presets:

* `axis_name`: the workers' axis, or `HostAxes`. With these the devices of a
  host are one worker of `lion` and `signum`, with one vote.
* `learning_rate`: a number or a schedule.
* `weight_decay`: decoupled, in units of the learning rate: a number or a scalar
  array.
* `nonfinite`: "propagate", "skip" or "zero", for gradients that are not finite,
  as for `exchange`.
* `tx`: optimizer that treats every element by itself, as for `sharded`.
* `momentum`: factor on the momentum, in [0, 1).
* `min_size`: least number of elements of a leaf that is not sent whole.
* `count`: coefficients or elements of a tile that are sent.
* `chunk`: greatest length of a side of a tile, 1 to 256.
* `one_bit`: whether zeros, and ties, count as positive.
* `inner`: optimizer of each worker, such as `optax.adamw(4e-4)`.
* `every`: number of steps between two exchanges of the same parameters.
* `codec`, of a scheme: codec of what workers have changed; None is full
  precision.
* `outer_rate`, `outer_momentum`: those of the outer optimizer, gradient descent
  with Nesterov's momentum, which is in [0, 1).
* `options`: other arguments of the scheme that a preset makes, such as `mix`,
  `parts` or `fragments` of `local_updates` and `stacked` of `fully_sharded`.
  One that the preset sets itself is a TypeError.

An argument of another type is a TypeError, one out of range a ValueError.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.presets._exchanges import (
  dgc as dgc,
  ef21_sgdm as ef21_sgdm,
  power_sgd as power_sgd,
  sdp4bit as sdp4bit,
)
from jaxmotion.presets._optimizers import (
  demo as demo,
  lion as lion,
  onebit_adam as onebit_adam,
  signum as signum,
  sparse_loco as sparse_loco,
)
from jaxmotion.presets._schemes import (
  diloco as diloco,
  muloco as muloco,
  streaming_diloco as streaming_diloco,
  zeropp as zeropp,
)

_set_public_module(__name__, globals())
