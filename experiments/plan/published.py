"""What config.json says of published checkpoints, as far as it decides what a run takes.

`experiments.plan` reads the shapes of these from here, so that nothing need be fetched.
"""

from typing import Any

V1_0 = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
FLAN = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def t5(width: int, head: int, inner: int, layers: int, heads: int, kind: dict) -> dict[str, Any]:
    """A T5 with as many layers on each side."""
    return {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": width,
        "d_kv": head,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        **kind,
    }


def llama(width: int, inner: int, layers: int, heads: int, tied: bool = False) -> dict[str, Any]:
    """A Llama 3, whose heads of keys and values are 8."""
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": tied,
    }


GATED = {
    "small": (512, 64, 1024, 8, 6),
    "base": (768, 64, 2048, 12, 12),
    "large": (1024, 64, 2816, 24, 16),
    "xl": (2048, 64, 5120, 24, 32),
    "xxl": (4096, 64, 10240, 24, 64),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "google-t5/t5-small": t5(512, 64, 2048, 6, 8, V1_0),
    "google-t5/t5-base": t5(768, 64, 3072, 12, 12, V1_0),
    "google-t5/t5-large": t5(1024, 64, 4096, 24, 16, V1_0),
    "google-t5/t5-3b": t5(1024, 128, 16384, 24, 32, V1_0),
    "google-t5/t5-11b": t5(1024, 128, 65536, 24, 128, V1_0),
    **{
        f"google/{kind}-{size}": t5(*shape, FLAN)
        for kind in ("t5-v1_1", "flan-t5")
        for size, shape in GATED.items()
    },
    "meta-llama/Llama-3.1-70B": llama(8192, 28672, 80, 64),
    "meta-llama/Llama-3.1-8B": llama(4096, 14336, 32, 32),
    "meta-llama/Llama-3.2-1B": llama(2048, 8192, 16, 32, tied=True),
}
