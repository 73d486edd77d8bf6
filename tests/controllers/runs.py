"""Controllers run over recorded signals."""

import jax


def run(controller, first, signals):
  """Returns the final state and the level after every update (steps, groups).

  `signals` has a leading axis of steps.
  """

  @jax.jit
  def go(first, signals):
    def step(state, signal):
      state = controller.update(signal, state)
      return state, controller.level(state)

    return jax.lax.scan(step, controller.init(first), signals)

  return go(first, signals)
