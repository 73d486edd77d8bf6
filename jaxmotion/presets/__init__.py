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

* `axis_name`: the workers' axis, or `HostAxes`.
* `learning_rate`: a number or a schedule.
* `weight_decay`: decoupled, in units of the learning rate: a number or a scalar
  array.
* `nonfinite`: "propagate", "skip" or "zero", for gradients that are not finite,
  as for `exchange`.
* `inner`: optimizer of each worker, such as `optax.adamw(4e-4)`.
* `every`: number of steps between two exchanges of the same parameters.
* `outer_rate`, `outer_momentum`: those of the outer optimizer, gradient descent
  with Nesterov's momentum, which is in [0, 1).
* `options`: other arguments of the scheme that a preset makes. One that the
  preset sets itself is a TypeError.

An argument of another type is a TypeError, one out of range a ValueError.
"""

from jaxmotion.core import set_public_module as _set_public_module
from jaxmotion.presets._exchanges import (
  dgc as dgc,
  diloco as diloco,
  ef21_sgdm as ef21_sgdm,
  muloco as muloco,
  power_sgd as power_sgd,
  sdp4bit as sdp4bit,
  streaming_diloco as streaming_diloco,
  zeropp as zeropp,
)
from jaxmotion.presets._optimizers import (
  demo as demo,
  lion as lion,
  onebit_adam as onebit_adam,
  signum as signum,
  sparse_loco as sparse_loco,
)

_set_public_module(__name__, globals())
