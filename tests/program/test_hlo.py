import jax
import jax.numpy as jnp

from jaxmotion.program import device_bytes, parse_hlo
from jaxmotion.program._hlo import parse_arrays

X = jnp.ones((8, 8))


def compiled(fn, *args):
  return jax.jit(fn).lower(*args).compile()


def test_a_loop_names_its_computations_and_trips():
  def fn(x):
    return jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x @ x), x)

  module = parse_hlo(compiled(fn, X).as_text())
  entry = module.computations[module.entry]
  (loop,) = [i for i in entry.values() if i.opcode == "while"]
  assert loop.known_trips == 5
  assert set(loop.called) == {"body", "condition"}
  assert loop.called["body"][0] in module.computations
  assert all(name in entry for name in loop.operand_names)
  assert [i.is_root for i in entry.values()].count(True) == 1


def test_arrays_have_dtypes_layouts_and_bytes():
  four, five = parse_arrays("(s4[16]{0:E(4)}, pred[5]{0}, token[])")
  assert (four.dtype, four.memory_bytes, four.element_bits) == ("int4", 8, 4)
  assert (five.dtype, five.memory_bytes) == ("bool", 5)
  (unpacked,) = parse_arrays("s4[16]{0}")
  assert unpacked.memory_bytes == 16
  for code, dtype, size in (
    ("s8", "int8", 5),
    ("bf16", "bfloat16", 10),
    ("f8e4m3fn", "float8_e4m3fn", 5),
    ("c64", "complex64", 40),
  ):
    (found,) = parse_arrays(f"{code}[5]")
    assert (found.dtype, found.memory_bytes) == (dtype, size)


def test_a_comment_is_no_operand():
  text = (
    "ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %r = f32[2]{0} add(f32[2] "
  )
  module = parse_hlo(text + "%a, /*index=1*/f32[2] %b), metadata={}\n}\n")
  (root,) = module.computations["main"].values()
  assert root.operand_names == ["a", "b"] and root.memory_bytes == 8


def test_donated_arguments_are_counted_once():
  program = jax.jit(lambda x: x + 1, donate_argnums=0).lower(X).compile()
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == 256
  assert device_bytes(memory) == 256 + memory.temp_size_in_bytes
