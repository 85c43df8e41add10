"""Tiny checkpoints of Gemma 2 and 3, as `llama_variants` has them of the Llama layout."""

from llama_variants import Variant, tensors, texts, write

__all__ = ["VARIANTS", "Variant", "tensors", "texts", "write"]

LOCAL, WHOLE = "sliding_attention", "full_attention"
VARIANTS = {
    variant.name: variant
    for variant in (
        # Caps so low that they show, and heads that do not make up the model's width.
        Variant(
            "gemma2",
            "gemma2",
            {
                "num_hidden_layers": 3,
                "head_dim": 6,
                "query_pre_attn_scalar": 3,
                "sliding_window": 5,
                "attn_logit_softcapping": 1.5,
                "final_logit_softcapping": 2.0,
            },
        ),
        Variant(
            "gemma2_untied",
            "gemma2",
            {
                "head_dim": 4,
                "num_key_value_heads": 4,
                "query_pre_attn_scalar": 4,
                "sliding_window": 4,
                "layer_types": [WHOLE, LOCAL],
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "rope_theta": 100.0,
            },
        ),
        # Rotations as files of 2025 spell them.
        Variant(
            "gemma3",
            "gemma3_text",
            {
                "num_hidden_layers": 3,
                "head_dim": 8,
                "query_pre_attn_scalar": 6,
                "sliding_window": 4,
                "sliding_window_pattern": 2,
                "rope_theta": 300.0,
                "rope_local_base_freq": 10.0,
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
        ),
        Variant(
            "gemma3_untied",
            "gemma3_text",
            {
                "head_dim": 4,
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 4,
                "sliding_window": 3,
                "layer_types": [WHOLE, LOCAL],
                "final_logit_softcapping": 2.0,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    WHOLE: {"rope_type": "default", "rope_theta": 300.0},
                    LOCAL: {"rope_type": "default", "rope_theta": 20.0},
                },
            },
        ),
    )
}
