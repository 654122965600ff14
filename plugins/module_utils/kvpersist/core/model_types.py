"""What a config.json leaves to its model type: defaults of fields that are not written, and how layers alternate.

The values are the class defaults of transformers 5.19.0 (``models/*/configuration_*.py``), for the types whose
published files rely on them; a test compares them with the installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping

_DEEPSEEK_V3 = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 4096,
}


def _type(layers: int, hidden: int, heads: int, length: int, **others: int | bool) -> Mapping[str, int | bool]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        **others,
    }


_QWEN_WINDOW = {"sliding_window": 4096, "use_sliding_window": False}

DEFAULTS: Mapping[str, Mapping[str, int | bool]] = {
    "arcee": _type(32, 2560, 32, 4096),
    "cohere": _type(40, 8192, 64, 8192),
    "cohere2": _type(40, 8192, 64, 8192, sliding_window=4096),
    "deepseek_v2": _type(32, 4096, 32, 2048, kv_lora_rank=512, qk_rope_head_dim=64),
    "deepseek_v3": _DEEPSEEK_V3,
    # vLLM reads these two with DeepSeek-V3's class (0.32.0, vllm/transformers_utils/config.py).
    "deepseek_v32": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "ernie4_5": _type(18, 1024, 16, 131072, num_key_value_heads=2, head_dim=128),
    "ernie4_5_moe": _type(28, 2560, 20, 131072, num_key_value_heads=4),
    "exaone4": _type(32, 4096, 32, 2048, num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4),
    "falcon": _type(32, 4544, 71, 2048, multi_query=True, new_decoder_architecture=False),
    "gemma": _type(28, 3072, 16, 8192, num_key_value_heads=16, head_dim=256),
    "gemma2": _type(26, 2304, 8, 8192, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3_text": _type(26, 2304, 8, 131072, num_key_value_heads=4, head_dim=256, sliding_window=4096),
    "gemma3n_text": _type(
        35, 2048, 8, 32768, num_key_value_heads=2, head_dim=256, sliding_window=512, num_kv_shared_layers=15
    ),
    "gemma4_text": _type(30, 2304, 8, 131072, num_key_value_heads=4, head_dim=256, sliding_window=512),
    "glm": _type(40, 4096, 32, 131072, num_key_value_heads=2, head_dim=128),
    "glm4": _type(40, 4096, 32, 131072, num_key_value_heads=2, head_dim=128),
    "glm4_moe": _type(46, 4096, 96, 131072, num_key_value_heads=8),
    "glm4_moe_lite": _type(47, 2048, 20, 202752, kv_lora_rank=512, qk_rope_head_dim=64),
    "glm_moe_dsa": _type(
        78, 6144, 64, 202752, kv_lora_rank=512, qk_rope_head_dim=64, index_topk=2048, index_head_dim=128
    ),
    "gpt_oss": _type(36, 2880, 64, 131072, num_key_value_heads=8, head_dim=64, sliding_window=128),
    "granite": _type(32, 4096, 32, 2048),
    "hunyuan_v1_dense": _type(32, 4096, 32, 2048),
    "llama": _type(32, 4096, 32, 2048),
    "llama4_text": _type(
        48,
        5120,
        40,
        131072,
        num_key_value_heads=8,
        head_dim=128,
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
    ),
    "mimo_v2_flash": _type(48, 4096, 64, 131072, num_key_value_heads=4, head_dim=192, v_head_dim=128),
    "minimax_m2": _type(62, 3072, 48, 196608, num_key_value_heads=8, head_dim=128),
    "ministral3": _type(34, 4096, 32, 262144, num_key_value_heads=8, head_dim=128),
    "mistral": _type(32, 4096, 32, 131072, num_key_value_heads=8, sliding_window=4096),
    "mixtral": _type(32, 4096, 32, 131072, num_key_value_heads=8),
    "nemotron": _type(32, 6144, 48, 4096),
    "olmo2": _type(32, 4096, 32, 2048),
    "olmo3": _type(32, 4096, 32, 2048, sliding_window=4096),
    "phi3": _type(32, 3072, 32, 4096),
    "qwen2": _type(32, 4096, 32, 32768, num_key_value_heads=32, max_window_layers=28, **_QWEN_WINDOW),
    "qwen2_moe": _type(24, 2048, 16, 32768, num_key_value_heads=16, max_window_layers=28, **_QWEN_WINDOW),
    "qwen2_5_vl_text": _type(80, 8192, 64, 32768, num_key_value_heads=8, max_window_layers=80, **_QWEN_WINDOW),
    "qwen2_vl_text": _type(80, 8192, 64, 32768, num_key_value_heads=8, max_window_layers=80, **_QWEN_WINDOW),
    "qwen3": _type(32, 4096, 32, 32768, num_key_value_heads=32, head_dim=128, max_window_layers=28, **_QWEN_WINDOW),
    "qwen3_moe": _type(24, 2048, 32, 32768, num_key_value_heads=4, **_QWEN_WINDOW),
    "qwen3_vl_moe_text": _type(24, 2048, 16, 128000, num_key_value_heads=16),
    "qwen3_vl_text": _type(32, 4096, 32, 128000, num_key_value_heads=32, head_dim=128),
    "seed_oss": _type(64, 4096, 80, 524288, num_key_value_heads=8, head_dim=128),
    "smollm3": _type(36, 2048, 16, 32768, num_key_value_heads=4, use_sliding_window=False),
    "starcoder2": _type(30, 3072, 24, 4096, num_key_value_heads=2),
}

# Which layer is the first full one after sliding-window layers, where config.json names no layer types.
FULL_EVERY: Mapping[str, int] = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "gpt_oss": 2,
    "olmo3": 4,
}

# The model types for which vLLM caches DeepSeek's latent (0.32.0, model_arch_config_convertor.py, is_deepseek_mla),
# less those whose layers also keep something else.
MLA_TYPES = frozenset(
    {
        "axk1",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "pangu_ultra_moe",
    }
)

# Whole families whose KV this version cannot tell, with what keeps it from that.
REFUSED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"),
        "its layers keep a state that is not KV",
    ),
    **dict.fromkeys(("deepseek_v4", "deepseek_v41"), "its layers keep compressed KV of several kinds"),
    "longcat_flash": "each of its layers holds two attention layers",
    "mllama": "its cross-attention layers keep KV of images",
    "nemotron-nas": "its layers differ in a way that vLLM decides",
    "openelm": "its layers differ in their number of heads",
}
