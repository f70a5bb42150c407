"""A measured base becomes a model whose layers add up to the encode stage."""

from __future__ import annotations

import pytest

from hplm.errors import ConfigError
from hplm.placement.measured import outside_s, served_model
from hplm.profiles.profile import LayerTiming, Memory, Timing
from tests.unit.hplm.profiles.made_profiles import made_profile

LAYERS = (LayerTiming(1, 8, (1.0, 3.0)), LayerTiming(1, 64, (2.0, 2.0)))


def test_the_layers_divide_the_encode_stages_time_as_measured() -> None:
    profile = made_profile(layers=LAYERS, encode=(Timing(1, 8, 2.0), Timing(1, 64, 16.0)))
    assert served_model(profile, 8).layer_s == pytest.approx((0.0005, 0.0015))
    assert served_model(profile, 64).layer_s == pytest.approx((0.008, 0.008))


def test_layers_hold_weights_and_slots_and_every_device_the_rest_of_the_process() -> None:
    profile = made_profile(layers=LAYERS, memory=Memory(1000, 10, 101, 50, 8, encode_process=5000))
    model = served_model(profile, 8)
    assert model.layer_bytes == (551, 551)
    assert model.fixed_bytes == 5000 - 1101


def test_hidden_states_and_hops_pass_between_stages() -> None:
    model = served_model(made_profile(), 8, hidden_size=64, hop_s=0.001)
    assert (model.boundary_bytes, model.hop_s) == (4 * 8 * 64, 0.001)


def test_a_batch_takes_less_than_its_requests_one_by_one() -> None:
    encode = tuple(Timing(texts, 8, 1.0 + texts) for texts in (1, 2, 8))
    times = served_model(made_profile(encode=encode), 8, most_batch=4).batch_times
    assert times == pytest.approx((1, 1.5, 2, 2.5), rel=0.01)


def test_the_time_outside_the_encode_stage_is_the_rest_of_a_request() -> None:
    assert outside_s(made_profile(), 8) == pytest.approx(0.002)


def test_a_profile_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="base 'tiny': a profile with the times of layers was expected"):
        served_model(made_profile(layers=()), 8)


@pytest.mark.parametrize(("tokens", "most_batch"), [(0, 1), (8, 0)])
def test_no_tokens_and_no_requests_are_refused(tokens: int, most_batch: int) -> None:
    with pytest.raises(ConfigError, match="a token and a request at least"):
        served_model(made_profile(), tokens, most_batch=most_batch)
