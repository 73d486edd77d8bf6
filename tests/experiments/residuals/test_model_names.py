"""Names and options of models on a command line."""

import pytest

from experiments import models
from experiments.common.console import JobError
from experiments.perfmodel.reference import reference_network
from experiments.perfmodel.sweep import NETWORKS
from experiments.residuals.model_names import check_model, list_networks


def list_choices(call):
  """Returns the names that an error of a function lists."""
  with pytest.raises(ValueError, match="`name` must be one of") as caught:
    call("nothing")
  listed = str(caught.value).partition("one of ")[2].partition(", got")[0]
  return [name.strip("'") for name in listed.split(", ")]


def test_all_networks_are_listed():
  assert list_choices(models.make_network) == list_networks()
  assert list_choices(reference_network) == list(NETWORKS)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("lstm", "NAME must be one of gpt, .* got 'lstm'"),
    ("gpt:layer=3", "OPTION of gpt must be .* 'layer'; did you mean 'layers'"),
    ("mlp_relu:kind=1", "must be one of blocks, .* 'kind'"),
    ("gpt:layers", "layers of gpt must be a positive number, true or"),
    ("gpt:layers=0", "layers of gpt must be a positive number, true or"),
    ('gpt:layers="a"', "layers of gpt must be a positive number, true or"),
    ("gpt:layers=NaN", "layers of gpt must be a positive number, true or"),
    ("resnet50:image=1", "that can be made, got 'resnet50:image=1': "),
  ],
)
def test_a_model_that_cannot_be_made_is_refused(text, message):
  with pytest.raises(JobError, match=message) as caught:
    check_model(text)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["gpt", "gpt:layers=2:flash=true"])
def test_a_model_that_can_be_made_stays(text):
  assert check_model(text) == text
