"""Rotations are found on the model itself, and turn keys as the model would have."""

import pytest
import torch
from reference import Rope
from transformers import AutoConfig, Cohere2Config, LlamaConfig
from zoo import SPECIMENS, build

from kvlab.cache import UnsupportedModelError
from kvlab.cache.rotary import Rotation, find_rotations, position_limit

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 32}


def as_written(rope: Rope | None) -> tuple | None:
    if rope is None:
        return None
    inv_freq = rope.theta ** (-torch.arange(0, rope.dims, 2) / rope.dims)
    return rope.interleaved, [pytest.approx(float(f), rel=1e-6) for f in inv_freq]


@pytest.mark.parametrize("name", SPECIMENS)
@pytest.mark.parametrize("source", ["model", "config", "meta", torch.bfloat16])
def test_every_familys_rotation_is_found(name, source):
    expected = [as_written(rope) for rope in SPECIMENS[name].ropes]
    if source == "config":
        model = SPECIMENS[name].config
    elif source == "meta":
        model_class = type(build(name, "eager"))
        with torch.device("meta"):
            model = model_class(SPECIMENS[name].config)
    else:
        model = build(name, "eager", torch.float32 if source == "model" else source)
    found = [r and (r.interleaved, list(r.inv_freq)) for r in find_rotations(model)]
    assert found == expected


def test_a_config_gives_what_its_model_gives_for_scaled_frequencies():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters=rope)
    model = type(build("llama", "eager"))(config).eval()
    assert find_rotations(config) == find_rotations(model)
    assert find_rotations(config) != find_rotations(LlamaConfig(**SMALL, num_key_value_heads=2))


def test_layers_without_positions_are_told_apart():
    config = Cohere2Config(**SMALL, num_key_value_heads=2, layer_types=["sliding_attention", "full_attention"] * 2)
    assert [rotation is None for rotation in find_rotations(config)] == [False, True, False, True]


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "opt", "gptj", "mpt"])
def test_models_without_a_rotary_embedding_are_refused(kind):
    config = AutoConfig.for_model(kind)
    with pytest.raises(UnsupportedModelError, match="has no rotary embedding, so sinks cannot be moved"):
        find_rotations(config)


def test_latent_attention_is_refused():
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=1, n_routed_experts=4, vocab_size=32)
    with pytest.raises(UnsupportedModelError, match=r"the values of layer 0 .* change with the position"):
        find_rotations(config)


def test_keys_no_frequency_explains_are_refused():
    model = type(build("llama", "eager"))(SPECIMENS["llama"].config).eval()
    original = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: original(x, position_ids * 3)
    with pytest.raises(UnsupportedModelError, match=r"explains the keys of layer 0 of LlamaForCausalLM \(best misses"):
        find_rotations(model)


def test_a_model_without_weights_shows_no_rotation():
    model = type(build("llama", "eager"))(SPECIMENS["llama"].config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(UnsupportedModelError, match=r"keys of layer 0 .* are zero"):
        find_rotations(model)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [8, 6])
def test_turning_leaves_the_dimensions_beyond_the_rotation_alone(interleaved, dims):
    rope = Rope(dims=dims, theta=100.0, interleaved=interleaved)
    rotation = Rotation.of(100.0 ** (-torch.arange(0, dims, 2) / dims), interleaved)
    keys, distance = torch.randn(5, 8), torch.arange(5)
    angles = distance[:, None] * rotation.frequencies("cpu")
    turned = rotation.turned(keys, angles.cos(), angles.sin())
    assert torch.allclose(turned, rope.turn(keys, distance), atol=1e-6)
    assert torch.equal(turned[:, dims:], keys[:, dims:])


def test_16_bit_keys_are_rounded_once():
    rotation, keys = Rotation((0.7, 0.1)), torch.randn(50, 4).bfloat16()
    angles = torch.arange(50)[:, None] * rotation.frequencies("cpu")
    cos, sin = angles.cos(), angles.sin()
    exact = rotation.turned(keys.double(), cos.double(), sin.double())

    def beyond_one_rounding(turned):
        return float(((turned.double() - exact).abs() - exact.abs() / 256).max())  # half a step of bfloat16

    assert beyond_one_rounding(rotation.turned(keys, cos, sin)) < 1e-7
    assert beyond_one_rounding(rotation.turned(keys, cos.bfloat16(), sin.bfloat16())) > 1e-4  # rounded before, too


def rope_of(kind: str, **more) -> LlamaConfig:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **more}
    return LlamaConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=128, rope_parameters=rope)


def test_only_types_whose_frequencies_change_with_the_length_have_a_limit():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert position_limit(rope_of("default")) is None
    assert position_limit(rope_of("linear", factor=2.0)) is None
    assert position_limit(rope_of("dynamic", factor=2.0)) == 128
    assert position_limit(rope_of("longrope", original_max_position_embeddings=32, **factors)) == 32
    assert position_limit(SPECIMENS["gemma3"].config) is None


def test_a_model_is_probed_once_however_many_caches_it_serves():
    model, forwards = type(build("llama", "eager"))(SPECIMENS["llama"].config).eval(), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    first = find_rotations(model)
    assert len(forwards) == 2
    assert find_rotations(model) is first
    assert len(forwards) == 2
    assert find_rotations(model.bfloat16()) != first  # the cast rounded the frequencies
