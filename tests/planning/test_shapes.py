"""Shaped profiles have the tensors of the real models."""

import pytest

from spardl.errors import ConfigError
from spardl.planning.shapes import resnet50, shape, vgg16


@pytest.mark.parametrize(("make", "tensors", "parameters"), [(resnet50, 161, 25_557_032), (vgg16, 54, 14_728_266)])
def test_tensors_and_parameters_are_those_of_the_model(make, tensors, parameters):
    profile = make()
    assert (len(profile.layers), profile.elements) == (tensors, parameters)


def test_backward_runs_from_the_last_layer_and_takes_the_time_given():
    profile = resnet50(forward=0.5, backward=0.25)
    assert (profile.layers[0].name, profile.layers[-1].name) == ("fc.bias", "conv1.weight")
    assert profile.backward == pytest.approx(0.25)
    assert profile.forward == 0.5


def test_time_goes_where_the_operations_are():
    """The classifier holds 8 % of ResNet-50's parameters and a thousandth of its work."""
    profile = resnet50()
    layers = {layer.name: layer for layer in profile.layers}
    assert layers["fc.weight"].seconds < 1e-3 * profile.backward
    assert layers["layer1.0.conv2.weight"].seconds > 20 * layers["fc.weight"].seconds


def test_shapes_are_found_by_name():
    assert shape("vgg16") == vgg16()
    with pytest.raises(ConfigError, match="Did you mean resnet50"):
        shape("resnet5")
