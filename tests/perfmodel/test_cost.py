"""FLOPs and bytes of traced functions."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import codecs
from jaxmotion.perfmodel import predict_cost

F32 = 4


def array(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def convolve(x, w, strides=(1, 1), padding="SAME", **options):
  numbers = ("NHWC", "HWIO", "NHWC")
  return lax.conv_general_dilated(
    x, w, strides, padding, dimension_numbers=numbers, **options
  )


def gradients(fn):
  """Both gradients of a product, and nothing of the forward pass."""

  def backward(x, w, ct):
    return jax.vjp(fn, x, w)[1](ct)

  return backward


def mlp(params, x, y):
  for w, b in params:
    x = jax.nn.relu(x @ w + b[None])
  return jnp.mean((x - y) ** 2)


MLP = ([(array(64, 64), array(64))] * 3, array(32, 64), array(32, 64))


def compiled(fn, *args):
  analysis = jax.jit(fn).lower(*args).compile().cost_analysis()
  flops = analysis["flops"] + analysis.get("transcendentals", 0)
  return flops, analysis["bytes accessed"]


def normed(x):
  mean = x.mean(-1, keepdims=True)
  return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


PROGRAMS = {
  "chain": (lambda x: jnp.tanh(2 * x + 1), array(1000)),
  "integers": (lambda x: (2 * x + 1) ^ 3, array(1000, dtype="uint32")),
  "power": (lambda x: x**7, array(1000)),
  "mlp": (jax.value_and_grad(mlp), *MLP),
  "softmax": (jax.nn.softmax, array(64, 100)),
  "norm": (normed, array(64, 1000)),
  "pool": (
    lambda x: lax.reduce_window(
      x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    array(2, 8, 8, 3),
  ),
  "adam": (
    lambda g, s: optax.adam(1e-3).update(g, s),
    array(64, 64),
    jax.eval_shape(optax.adam(1e-3).init, array(64, 64)),
  ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_flops_and_bytes_are_near_the_compilers(name):
  # XLA rewrites programs, so that a few operations come or go.
  fn, *args = PROGRAMS[name]
  ours = predict_cost(fn, *args)
  flops, nbytes = compiled(fn, *args)
  assert ours.flops == pytest.approx(flops, rel=0.2)
  assert ours.bytes == pytest.approx(nbytes, rel=0.25)
  assert ours.unknown == {}
  assert 0 < ours.bytes <= ours.unfused_bytes
  inputs = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(args))
  assert ours.peak_bytes >= inputs


@pytest.mark.parametrize(
  ("stride", "dilation"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 1)), (1, (2, 1))]
)
def test_convolutions_and_their_gradients_are_the_compilers(stride, dilation):
  def fn(x, w):
    (spread, step), strides = dilation, (stride, stride)
    padding = ((3, 1), (0, 2))
    options = dict(lhs_dilation=(spread,) * 2, rhs_dilation=(step,) * 2)
    return convolve(x, w, strides, padding, **options)

  x, w = array(2, 14, 11, 8), array(3, 3, 8, 16)
  y = jax.eval_shape(fn, x, w)
  assert predict_cost(fn, x, w).flops == compiled(fn, x, w)[0]
  both = gradients(fn)
  assert predict_cost(both, x, w, y).flops == compiled(both, x, w, y)[0]


@pytest.mark.parametrize(("groups", "size"), [(1, 7), (4, 12)])
def test_both_gradients_of_a_convolution_take_what_it_takes(groups, size):
  def fn(x, w):
    return convolve(x, w, (2, 2), feature_group_count=groups)

  x, w = array(3, size, size, 8), array(5, 5, 8 // groups, 16)
  forward = predict_cost(fn, x, w)
  backward = predict_cost(gradients(fn), x, w, jax.eval_shape(fn, x, w))
  products = backward.totals["convolution"]
  assert products.flops == 2 * forward.flops
  # By hand: every place of the input that a tap meets, in each dimension.
  out = -(-size // 2)
  padding = max((out - 1) * 2 + 5 - size, 0) // 2
  places = itertools.product(range(out), range(5))
  meets = sum(0 <= 2 * o + tap - padding < size for o, tap in places)
  assert forward.flops == 2 * 3 * 16 * (8 // groups) * meets**2


def test_matrix_products_are_exact_forward_and_backward():
  x, w = array(4, 10, 20), array(20, 30)
  fn = lambda x, w: jnp.einsum("bik,kj->bij", x, w)
  forward = predict_cost(fn, x, w)
  assert forward.flops == 2 * 4 * 10 * 20 * 30
  assert forward.bytes == F32 * (4 * 10 * 20 + 20 * 30 + 4 * 10 * 30)
  backward = predict_cost(gradients(fn), x, w, array(4, 10, 30))
  assert backward.flops == 2 * forward.flops
  (kernel,) = forward.kernels
  assert (kernel.kind, kernel.dtype) == ("matmul", "float32")
  # A batched product of bfloat16, whose operand is read once.
  x = array(3, 8, 8, dtype="bfloat16")
  half = predict_cost(lambda x: x @ x, x)
  assert half.flops == 2 * 3 * 8**3
  assert half.bytes == 2 * 2 * 3 * 64
  assert half.kernels[0].dtype == "bfloat16"


def test_a_chain_is_written_once_and_so_is_a_costly_value_with_many_readers():
  def three(y):
    return y.sum(-1), y.max(-1), y.min(-1)

  x, results = array(8, 1000), 3 * F32 * 8
  cheap = predict_cost(lambda x: three(2 * x), x)
  assert cheap.bytes == 3 * F32 * 8000 + results
  # Written once and read three times; else it were computed three times.
  costly = predict_cost(lambda x: three(jnp.exp(x)), x)
  assert costly.bytes == 5 * F32 * 8000 + results
  chain = predict_cost(lambda x: jnp.sqrt(x * 3 + 1), array(100))
  assert (chain.bytes, chain.unfused_bytes) == (2 * F32 * 100, 6 * F32 * 100)


def test_scan_counts_its_body_as_often_as_it_runs():
  def layer(x, w):
    return jnp.tanh(x @ w), None

  x, ws = array(8, 16), array(10, 16, 16)
  scanned = predict_cost(lambda x, ws: lax.scan(layer, x, ws)[0], x, ws)

  def unrolled(x, ws):
    for w in ws:
      x, _ = layer(x, w)
    return x

  whole = predict_cost(unrolled, x, [array(16, 16)] * 10)
  assert scanned.flops == whole.flops == 10 * (2 * 8 * 16 * 16 + 8 * 16)
  assert scanned.bytes == whole.bytes
  assert scanned.unfused_bytes == whole.unfused_bytes


def halved(x):
  def halve(x):
    return x / 2

  return lax.while_loop(lambda x: x.sum() > 1, halve, x)


def test_a_while_loop_without_a_number_is_named_and_the_library_has_none():
  x = array(100)
  with pytest.raises(ValueError, match=r"`while_trips`.*\(halve at .*got None"):
    predict_cost(halved, x)
  none, five = (predict_cost(halved, x, while_trips=n) for n in (0, 5))
  assert none.flops == 100 - 1 + 1  # the condition alone
  assert five.flops == 5 * 100 + 6 * none.flops
  codec = codecs.feedback(codecs.uniform(bits=8))
  x = array(64, 512)
  state = jax.eval_shape(codec.init, x)
  cost = predict_cost(lambda x, state: codec.encode(x, state), x, state)
  assert 0 < cost.flops < 100 * x.size


def test_of_platforms_the_backends_branch_alone_counts():
  def fn(x):
    return lax.platform_dependent(
      x, cpu=lambda x: x @ x, cuda=lambda x: x @ x @ x, default=jnp.sin
    )

  x = array(16, 16)
  product = 2 * 16**3

  def products(backend):
    totals = predict_cost(fn, x, backend=backend).totals
    return getattr(totals.get("matmul"), "flops", 0)

  found = {name: products(name) for name in ("cpu", "cuda", "tpu")}
  assert found == {"cpu": product, "cuda": 2 * product, "tpu": 0}
  here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
  assert products(None) == products(here)
  many = array(3, 16, 16)
  looped = predict_cost(lambda x: lax.map(fn, x), many, backend="cuda")
  assert looped.totals["matmul"].flops == 3 * 2 * product


@jax.custom_vjp
def square(x):
  return x @ x


square.defvjp(lambda x: (x @ x, None), lambda _, g: (g,))


@jax.custom_jvp
def square_tangent(x):
  return x @ x


square_tangent.defjvps(lambda t, out, x: t)
CALLS = {
  "jit": jax.jit(lambda x: x @ x),
  "checkpoint": jax.checkpoint(lambda x: x @ x),
  "custom_vjp": square,
  "custom_jvp": square_tangent,
  # Of the branches, the heavier one counts.
  "cond": lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x + 1, x),
  # What nobody needs does not.
  "unused": lambda x: (x @ x, jnp.sum(x @ x @ x))[0],
  # A loop of known length needs no number.
  "fori_loop": lambda x: lax.fori_loop(0, 1, lambda _, x: x @ x, x),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_branches_and_loops_are_entered(name):
  total = predict_cost(CALLS[name], array(16, 16))
  assert total.totals["matmul"].flops == 2 * 16**3
  assert total.unknown == {}


def test_a_checkpoint_is_computed_again_in_the_backward_pass():
  def loss(w, x, wrap):
    layer = wrap(lambda x: jnp.tanh(jnp.tanh(x @ w) @ w))
    return layer(layer(x)).sum()

  def products(wrap):
    step = jax.grad(lambda w, x: loss(w, x, wrap))
    total = predict_cost(step, array(16, 16), array(8, 16))
    return total.totals["matmul"].flops / (2 * 8 * 16 * 16)

  assert products(lambda f: f) == 4 + 7
  assert products(jax.checkpoint) > 4 + 7


def test_in_a_shard_map_the_cost_is_that_of_one_device():
  mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
  fn = jax.shard_map(
    lambda x, w: lax.psum(x @ w, "data"),
    mesh=mesh,
    in_specs=(P("data"), P()),
    out_specs=P(),
  )
  total = predict_cost(fn, array(32, 16), array(16, 8))
  assert total.totals["matmul"].flops == 2 * 8 * 16 * 8
  assert total.totals["collective"].bytes == 2 * F32 * 8 * 8


def test_what_a_loop_carries_for_nobody_is_not_counted():
  def step(carry, _):
    return (carry[0] + 1, carry[1] @ carry[1]), None

  x = array(16, 16)
  run = lambda x: lax.scan(step, (x, x), None, length=3)[0][0]
  assert predict_cost(run, x).flops == 3 * 256


def test_an_unknown_primitive_is_listed_and_what_it_holds_is_entered():
  factor, x = jnp.linalg.cholesky, array(8, 8)
  total = predict_cost(factor, x)
  assert total.unknown == {"cholesky": 1}
  assert total.totals["other"].bytes == 2 * F32 * 64
  looped = lambda x: lax.fori_loop(0, 3, lambda _, x: factor(x), x)
  assert predict_cost(looped, x).unknown == {"cholesky": 3}

  def solve(b):
    return lax.custom_linear_solve(
      lambda x: 2 * x, b, lambda _, b: jnp.diag(b) @ b, symmetric=True
    )

  total = predict_cost(solve, array(8))
  assert total.unknown["custom_linear_solve"] == 1
  assert total.totals["matmul"].flops >= 2 * 8 * 8


def test_gathers_read_what_they_take_and_scatters_write_where_they_do():
  table, places = array(10_000, 64), array(10, dtype="int32")
  taken = predict_cost(lambda t, i: t.at[i].get(mode="clip"), table, places)
  assert taken.totals["gather_scatter"].bytes <= 2 * F32 * 640 + 100
  added = predict_cost(
    lambda t, i, x: t.at[i].add(x), table, places, array(10, 64)
  )
  assert added.totals["gather_scatter"].bytes <= 3 * F32 * 640 + 100
  assert added.totals["gather_scatter"].flops == 640


def test_what_changes_a_slice_in_place_is_computed_there():
  def update(stack, gradient, i):
    own = lax.dynamic_index_in_dim(stack, i)
    new = own - 0.1 * gradient
    return lax.dynamic_update_index_in_dim(stack, new, i, 0)

  place = array(dtype="int32")
  (kernel,) = predict_cost(
    update, array(100, 640), array(1, 640), place
  ).kernels
  # The rows and their gradients are read, the rows written.
  assert kernel.bytes == pytest.approx(3 * F32 * 640, abs=100)
  assert kernel.flops >= 2 * 640


def test_random_words_are_counted_by_the_word():
  key = jax.eval_shape(lambda: jax.random.key(0))
  for count in (1000, 2000):
    found = predict_cost(lambda k, n=count: jax.random.bits(k, (n,)), key)
    assert found.totals["random"].flops == count * 58.5


def test_results_are_ready_in_program_order():
  def fn(x):
    y = x @ x
    return y @ y, y, x

  assert predict_cost(fn, array(8, 8)).written == (2, 1, 0)


def test_the_peak_is_what_lives_at_once_also_in_a_loop():
  def deep(x, w):
    for _ in range(5):
      x = x @ w
    return x

  x, w = array(100, 10), array(10, 10)
  # Arguments, and of the chain two arrays at a time.
  assert predict_cost(deep, x, w).peak_bytes == F32 * (1000 + 100 + 2000)
  # The backward pass keeps what each product has read.
  kept = predict_cost(jax.grad(lambda w, x: deep(x, w).sum()), w, x)
  assert kept.peak_bytes >= F32 * (1000 + 100 + 4000)

  def double(xs):
    def body(carry, x):
      return carry + x, 2 * x

    return jax.lax.scan(body, jnp.zeros(10), jnp.sin(xs))

  # The argument, the sines that iterations read, the results, and the carry.
  rows = 50 * 10
  assert predict_cost(double, array(50, 10)).peak_bytes >= F32 * (3 * rows + 10)


def test_a_loop_fills_its_stacks_and_copies_what_no_kernel_writes_there():
  carry, rows = array(64, 64), array(10, 64, 64)
  stack = F32 * rows.size

  def count_stacks(body):
    run = lambda carry, rows: lax.scan(body, carry, rows)
    return predict_cost(run, carry, rows).bytes / stack

  # A row is read, its sine is written to the stack of zeros.
  assert count_stacks(lambda c, row: (c, jnp.sin(row))) == 3
  # A product reads two arrays and writes one, which is copied.
  assert count_stacks(lambda c, row: (c, row @ c)) == 6

  # The sine is written for the product that reads it, and copied, too.
  def multiply(c, row):
    sine = jnp.sin(row)
    return sine @ c, sine

  assert count_stacks(multiply) == 8


def test_constants_outside_of_a_loop_are_made_inside():
  """JAX moves them out of bodies; compilers move them in again."""

  def cost(make, is_outside):
    def run(x):
      own = make(x, -1e30), make(x, 2.0)

      def body(x, _):
        low, high = own if is_outside else (make(x, -1e30), make(x, 2.0))
        y = jnp.where(x > 0, x, low)
        return lax.scan(lambda y, _: (y * high, None), y, length=3)[0], None

      return lax.scan(body, x, length=5)[0]

    found = predict_cost(run, array(64, 64))
    return found.bytes, found.peak_bytes

  inside = cost(lambda x, c: lax.full(x.shape, c), False)
  assert cost(lambda x, c: lax.full(x.shape, c), True) == inside
  # What is computed from an argument is read in every iteration.
  read = cost(lambda x, c: c * x.T, True)
  assert all(a > b for a, b in zip(read, inside, strict=True))


def test_functions_are_kept_for_later_where_a_barrier_forbids_to_repeat_them():
  def loss(w, x):
    return jnp.sum(jnp.log(jnp.sum(jnp.exp(w[:, None] * x), axis=1)))

  def held(w, x):
    return loss(jax.lax.optimization_barrier(w), x)

  def count_rows(fn, *shape):
    found = predict_cost(jax.grad(fn), array(1000), array(*shape))
    return found.peak_bytes / (1000 * F32)

  # The exponential of the forward pass is computed again, or kept.
  assert count_rows(loss, 1000, 1000) < 1010
  assert count_rows(held, 1000, 1000) > 2000
  # It is not kept where it has more bytes than what it is computed from.
  assert count_rows(held, 1, 1000) < 10


def test_arrays_of_the_host_take_no_memory_of_the_device():
  def moved(x):
    y = jax.device_put(jnp.sin(x), jax.memory.Space.Host)
    z = x @ x
    return jax.device_put(y, jax.memory.Space.Device), z

  # The argument and both results; meanwhile, the sine is on the host.
  x = array(100, 100)
  assert predict_cost(moved, x).peak_bytes == F32 * 3 * 10_000


def test_totals_add_up():
  total = predict_cost(jax.value_and_grad(mlp), *MLP)
  assert sum(t.bytes for t in total.totals.values()) == total.bytes
  assert sum(k.count for k in total.kernels) == len(total.kernels)
  assert str(total).splitlines()[-1].split()[1] == f"{total.flops:.0f}"


def test_a_name_moves_nothing_and_ends_no_kernel():
  def layer(name):
    return lambda x: jnp.sum(name(jnp.tanh(name(x @ x)) * 2))

  x = array(64, 64)
  plain = predict_cost(layer(lambda x: x), x)
  named = predict_cost(layer(lambda x: checkpoint_name(x, "value")), x)
  assert named.kernels == plain.kernels
  assert named.totals == plain.totals


def test_to_read_bits_as_another_dtype_moves_nothing():
  def multiply(read):
    return lambda x, words: x @ read(words)

  x, words = array(64, 64), jax.ShapeDtypeStruct((64, 64), "uint32")
  decode = lambda words: lax.bitcast_convert_type(words, jnp.float32)
  decoded = predict_cost(multiply(decode), x, words)
  assert decoded.kernels == predict_cost(multiply(lambda y: y), x, x).kernels
