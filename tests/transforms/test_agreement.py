"""Processes that start from other parameters, codecs or numbers."""

import functools
import re

import optax
import pytest

from jaxmotion import codecs, transforms
from jaxmotion.transforms._step import _agreement, _scheme
from tests.transforms import test_processes

UNIFORM = r"uniform\(bits=4.*on process 0, .*uniform\(bits=8.*on process 1"
EXPECTED = {
  "same": "started",
  "values": r"`params` must be equal on all processes, got up = "
  r"float32\[16, 32\] of checksum .* on process 0, and float32\[16, 32\]",
  "shape": r"`params` .* got up = float32\[16, 32\] .* float32\[16, 24\]",
  "leaf": "`params` .* got .* = nothing on process 0, and float32.3.",
  "rate": "`scheme` .* got scale.step_size = -0.1 on .*, and -0.2 on",
  "schedule": "`scheme` .*schedule.decay_steps = 100 on .*, and 101 on",
  "codec": f"`scheme` .* got ExchangeOptions.codec = .*{UNIFORM}",
  "own_chain": f"`scheme` .* got opt_state/made_for = .*{UNIFORM}",
  "every": "`scheme` .* got LocalUpdates.every = 2 on .*, and 3 on",
  "weights": "`scheme` .* got GatherPlan.weight_codec = .*256.*512",
  "mean": "`model_state` .* got the array = float32",
  "local": "started",
  "apart": "started",
}


@functools.cache
def run_workers():
  return test_processes.run_in_processes(
    2, (), "tests.transforms.disagreeing_worker"
  )


@pytest.mark.parametrize("case", EXPECTED)
def test_processes_that_disagree_are_told_in_what(case):
  first, second = (said[case] for said in run_workers())
  assert first == second
  assert re.search(EXPECTED[case], first), first


def list_settings(scheme):
  found = _agreement._list_settings("", _scheme.as_scheme(scheme), set())
  return dict(found)


def test_numbers_and_codecs_of_a_chain_are_found():
  codec = codecs.feedback(codecs.sign())
  found = list_settings(
    optax.chain(
      transforms.exchange("data", codec),
      optax.clip_by_global_norm(2.0),
      optax.adamw(optax.cosine_decay_schedule(0.5, 7), weight_decay=0.25),
    )
  )
  assert found["exchange.codec"] == repr(codec)
  assert found["clip_by_global_norm.max_norm"] == "2.0"
  assert found["scale_by_adam.b1"] == "0.9"
  assert found["add_decayed_weights.weight_decay"] == "0.25"
  assert found["cosine_decay_schedule.decay_steps"] == "7"


def test_what_functions_of_others_hold_is_left_alone():
  rank = 3
  found = list_settings(
    optax.chain(
      transforms.exchange("data"), optax.scale_by_schedule(lambda n: n + rank)
    )
  )
  assert "3" not in found.values()
