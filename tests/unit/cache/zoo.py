"""The shared test matrix: tiny random models of every family the cache promises, and what it must keep of
each.

The rotary facts are written down by hand, as the reference must not learn them the way the cache does.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache

import torch
from reference import LayerRule, Rope
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SINKS, WINDOW = 3, 8
VOCAB = 89
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # wide enough that logits spread by about 1 and a wrong key shows
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**TINY, "num_hidden_layers": 2, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Specimen:
    """One tiny model: its config, the rotation of each layer, and which layers have a window of their own."""

    config: PreTrainedConfig
    ropes: tuple[Rope | None, ...]
    own_windows: dict[int, int] = field(default_factory=dict)  # layer: window, without sinks, if it fits
    implementations: tuple[str, ...] = ("eager", "sdpa")

    def rules(self, sinks: int = SINKS, window: int = WINDOW, turn: bool = True) -> list[LayerRule]:
        """What each layer sees under a policy of so many sinks and such a window."""
        rules = []
        for layer, rope in enumerate(self.ropes):
            own = self.own_windows.get(layer)
            keeps_own = own is not None and own <= sinks + window
            rules.append(LayerRule(0, own, rope) if keeps_own else LayerRule(sinks, window, rope, turn))
        return rules


def specimens() -> dict[str, Specimen]:
    full = Rope(dims=8, theta=10_000.0)
    hybrid = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    hybrids = {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 6, "layer_types": hybrid}
    return {
        "llama": Specimen(LlamaConfig(**GROUPED), (full,) * 2),
        "mistral": Specimen(MistralConfig(**GROUPED, sliding_window=None), (full,) * 2),
        "mistral-sliding": Specimen(MistralConfig(**GROUPED, sliding_window=12), (full,) * 2),
        "qwen2": Specimen(Qwen2Config(**GROUPED), (full,) * 2),
        "qwen3": Specimen(Qwen3Config(**GROUPED, head_dim=16), (Rope(dims=16, theta=10_000.0),) * 2),
        "gemma2": Specimen(
            Gemma2Config(**hybrids, query_pre_attn_scalar=8, final_logit_softcapping=None),
            (full,) * 4,
            {0: 6, 2: 6},
            implementations=("eager",),  # its SDPA does not exist in transformers: scores are capped
        ),
        "gemma3": Specimen(
            Gemma3TextConfig(**hybrids, query_pre_attn_scalar=8),
            (Rope(dims=8, theta=10_000.0), Rope(dims=8, theta=1_000_000.0)) * 2,
            {0: 6, 2: 6},
        ),
        "gpt-neox": Specimen(
            GPTNeoXConfig(
                **TINY,
                num_hidden_layers=2,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.5,
                },
            ),
            (Rope(dims=4, theta=10_000.0),) * 2,
        ),
        "phi": Specimen(
            PhiConfig(
                **TINY,
                num_hidden_layers=2,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "partial_rotary_factor": 0.5,
                },
            ),
            (Rope(dims=4, theta=10_000.0),) * 2,
        ),
        "cohere": Specimen(  # neighbouring dimensions are turned together
            CohereConfig(**GROUPED, logit_scale=1.0),
            (Rope(dims=8, theta=500_000.0, interleaved=True),) * 2,
        ),
        "smollm3": Specimen(  # its second layer has no positions at all
            SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]), (Rope(dims=8, theta=2_000_000.0), None)
        ),
    }


SPECIMENS = specimens()
CELLS = [(name, how) for name, specimen in SPECIMENS.items() for how in specimen.implementations]


@cache
def build(name: str, implementation: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a specimen: the same weights for every implementation and type."""
    config = deepcopy(SPECIMENS[name].config)  # a model writes its attention implementation into its config
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = model_class._from_config(config, attn_implementation=implementation, dtype=torch.float32)
    if dtype != torch.float32:  # not model.to(dtype), which would round the rotary frequencies too
        weights = model.state_dict()
        model = model_class._from_config(deepcopy(config), attn_implementation=implementation, dtype=dtype)
        model.load_state_dict(weights)
    return model.eval()


def text(length: int, seed: int = 0) -> torch.Tensor:
    """A random text (length,) without the padding token."""
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
