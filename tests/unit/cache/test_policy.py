"""CachePolicy: its defaults, what it refuses, and how it travels."""

import json

import pytest
from pydantic import ValidationError
from transformers import AutoConfig, LlamaConfig

from kvlab.cache import CachePolicy, PolicyError, ShiftingKVCache, SlidingWindowCache


def test_the_window_is_what_the_sinks_leave():
    policy = CachePolicy(max_total_tokens=6000)
    assert (policy.sinks, policy.window, policy.eviction) == (4, 5996, "ring")


def test_shift_has_no_sinks_and_by_default_drops_one_token_at_a_time():
    policy = CachePolicy(max_total_tokens=6000, eviction="shift")
    assert (policy.sinks, policy.high_water, policy.low_water) == (0, 6000, 5999)
    assert CachePolicy(max_total_tokens=6000, eviction="shift", high_water=5000).low_water == 4999


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_total_tokens": 0}, "greater than 0"),
        ({"max_total_tokens": -5}, "greater than 0"),
        ({"max_total_tokens": 8, "sinks": -1}, "greater than or equal to 0"),
        ({"max_total_tokens": 8, "sinks": 8}, "sinks=8 leave no window in max_total_tokens=8"),
        ({"max_total_tokens": 8, "sinks": 9}, "sinks=9 leave no window in max_total_tokens=8"),
        ({"max_total_tokens": 3}, "sinks=4 leave no window in max_total_tokens=3"),
        (
            {"max_total_tokens": 8, "high_water": 6},
            r"water marks \(high 6, low None\) belong to eviction='shift'",
        ),
        ({"max_total_tokens": 8, "eviction": "shift", "sinks": 2}, "keeps no sinks, got sinks=2"),
        (
            {"max_total_tokens": 8, "eviction": "shift", "high_water": 9},
            "high_water=9 exceeds max_total_tokens=8",
        ),
        (
            {"max_total_tokens": 8, "eviction": "shift", "low_water": 8},
            "low_water=8 must be below high_water=8",
        ),
        (
            {"max_total_tokens": 8, "eviction": "shift", "high_water": 4, "low_water": 6},
            "low_water=6 must be below",
        ),
        ({"max_total_tokens": 8, "eviction": "shift", "high_water": 0}, "greater than 0"),
        ({"max_total_tokens": 8, "eviction": "lru"}, "'ring' or 'shift'"),
        ({"max_total_tokens": 8, "dtype": "int8"}, "'float32', 'bfloat16' or 'float16'"),
        ({"max_total_tokens": True}, "valid integer"),
        ({"max_total_tokens": "512"}, "valid integer"),
        ({"max_total_tokens": 8, "rotate_sinks": "yes"}, "valid boolean"),
        ({"max_total_tokens": 8, "window": 4}, "Extra inputs are not permitted"),
        ({}, "Field required"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_its_numbers(fields, message):
    with pytest.raises(ValidationError, match=message):
        CachePolicy(**fields)


@pytest.mark.parametrize(
    "policy",
    [
        CachePolicy(max_total_tokens=2048, sinks=0, dtype="bfloat16"),
        CachePolicy(max_total_tokens=100, eviction="shift", high_water=90, low_water=50),
    ],
)
def test_a_policy_survives_json_and_the_models_config(policy, tmp_path):
    assert CachePolicy.model_validate_json(policy.model_dump_json()) == policy
    policy.to_config(LlamaConfig()).save_pretrained(tmp_path)
    assert CachePolicy.from_config(AutoConfig.from_pretrained(tmp_path)) == policy
    stored = json.loads((tmp_path / "config.json").read_text())["cache"]
    assert stored["max_total_tokens"] == policy.max_total_tokens
    assert stored["eviction"] == policy.eviction


def test_a_config_without_a_policy_says_so():
    with pytest.raises(PolicyError, match="LlamaConfig has no `cache` entry"):
        CachePolicy.from_config(LlamaConfig())


def test_each_cache_takes_only_its_own_eviction():
    with pytest.raises(PolicyError, match="needs a policy with eviction='shift', got 'ring'"):
        ShiftingKVCache(LlamaConfig(), CachePolicy(max_total_tokens=8))
    with pytest.raises(PolicyError, match="needs a policy with eviction='ring', got 'shift'"):
        SlidingWindowCache(LlamaConfig(), CachePolicy(max_total_tokens=8, eviction="shift"))
