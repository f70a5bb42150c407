"""Models to be placed, from what `hplm profile` measured."""

from __future__ import annotations

from hplm.errors import ConfigError
from hplm.placement.served_model import ServedModel
from hplm.profiles.profile import LayerTiming, Profile, interpolate, rising
from hplm.scheduling.cost import CostModel

# Bytes of a number of the hidden states that an encode stage sends to the next (FP32, tensor STATES).
STATE_BYTES = 4


def served_model(
    profile: Profile, tokens: int, *, hidden_size: int = 0, hop_s: float = 0.0, most_batch: int = 1
) -> ServedModel:
    """Return a measured base as a model to be placed, for requests of one text of `tokens` tokens.

    The model's time is that of the encode stage, which is the stage that is placed and cut. Its layers have the shares of that
    time that the profile measured for the number of tokens nearest to `tokens`. For the rest of a request's time see
    `outside_s`. Each layer has an equal part of the bytes of the weights and of the adapter slots. The rest of the encode
    stage's process is needed again on every device.

    `hidden_size` gives the bytes between stages; 0 if they share memory. `hop_s` is the time from one stage to the next.
    `most_batch` is the number of requests that a stage computes at once.

    Raises ConfigError if the profile has no times of layers.
    """
    if not profile.layers:
        raise ConfigError(
            f"base {profile.base!r}: a profile with the times of layers was expected, and that of {profile.measured_at} has "
            "none: measure the base with `hplm profile --models MODELS --name NAME`"
        )
    if tokens < 1 or most_batch < 1:
        raise ConfigError(f"a token and a request at least were expected, got {tokens} and {most_batch}")
    nearest = min(profile.layers, key=lambda timing: _distance(timing, tokens))
    layers = len(nearest.ms)
    encode_s = encode_seconds(profile, tokens)
    memory = profile.memory
    divided = memory.weights + memory.slots
    return ServedModel(
        profile.base,
        tuple(encode_s * ms / sum(nearest.ms) for ms in nearest.ms),
        # Rounded up, so that the layers hold all bytes.
        (-(-divided // layers),) * layers,
        fixed_bytes=max(0, memory.encode_process - divided),
        boundary_bytes=STATE_BYTES * tokens * hidden_size,
        hop_s=hop_s,
        batch_times=_batch_times(profile, tokens, most_batch),
    )


def encode_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds that the encode stage takes for one text of `tokens` tokens."""
    alone = [(timing.tokens, timing.ms) for timing in profile.encode if timing.texts == 1]
    return interpolate(rising(alone), tokens) / 1000


def outside_s(profile: Profile, tokens: int) -> float:
    """Return the seconds of a request that the encode stage does not take: client, Triton and look-up stage.

    A placement is planned for the deadline less these seconds.
    """
    return max(0.0, profile.latency_ms(tokens) / 1000 - encode_seconds(profile, tokens))


def _distance(timing: LayerTiming, tokens: int) -> tuple[int, int]:
    """Return how far a measured batch is from one text: in tokens first, then in texts."""
    return abs(timing.texts * timing.tokens - tokens), timing.texts


def _batch_times(profile: Profile, tokens: int, most_batch: int) -> tuple[float, ...]:
    """Return the seconds of 1, 2, ... texts as multiples of one text, by the cost model of the measured batches."""
    cost = CostModel.fit(profile.cost_samples())
    seconds = [cost.predict(texts * tokens, texts * tokens**2) for texts in range(1, most_batch + 1)]
    return tuple(second / seconds[0] for second in seconds)
