"""The stacks of Gemmas by the papers' equations: float64, head by head, without a cache."""

import numpy as np


def norm(x, weight, epsilon=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * (1 + weight)


def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def causal(offset, window):
    """Whether a query sees a key at offset = key − query."""
    return (offset <= 0) & (offset > -(window or len(offset)))


def run(w, place, config, x, sees=causal, encoded=None, merged=False):
    """Hidden states (T, E) after the last norm.

    Args:
      w: all tensors, in float64.
      place: where the names of the stack begin.
      x: (T, E), scaled embeddings.
      sees: a function like `causal`.
      encoded: the output of an encoder, for layers that read it.
      merged: whether self-attention reads it, rather than cross-attention.
    """
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    offset = np.arange(len(x))[None, :] - np.arange(len(x))[:, None]
    for i, window in enumerate(config.windows):
        layer, seen = f"{place}.layers.{i}", sees(offset, window)
        rope = config.local_rope if window and config.local_rope else config.rope
        speed = rope.theta ** (-2 * np.arange(size // 2) / size) / rope.factor
        turn = np.exp(1j * np.arange(len(x))[:, None] * speed)

        def linear(name, x, layer=layer):
            return x @ w[f"{layer}.{name}.weight"].T + w.get(f"{layer}.{name}.bias", 0)

        def scaled(name, x, layer=layer):
            return norm(x, w[f"{layer}.{name}.weight"]) if f"{layer}.{name}.weight" in w else x

        def turned(head, turn=turn):
            pairs = (head[:, : size // 2] + 1j * head[:, size // 2 :]) * turn
            return np.concatenate([pairs.real, pairs.imag], axis=-1)

        def attend(name, inputs, sources, linear=linear, scaled=scaled, turned=turned):
            """Attend to `sources`: what is read, seen, and whether it has positions."""
            heads = []
            for h in range(config.num_attention_heads):
                own, shared = (slice(j * size, (j + 1) * size) for j in (h, h // groups))
                query = scaled(f"{name}.q_norm", linear(f"{name}.q_proj", inputs)[:, own])
                query = turned(query) if name == "self_attn" else query
                scores, values = [], []
                for read, seen, placed in sources:
                    key = scaled(f"{name}.k_norm", linear(f"{name}.k_proj", read)[:, shared])
                    one = query @ (turned(key) if placed else key).T
                    one = capped(
                        one / config.query_pre_attn_scalar**0.5, config.attn_logit_softcapping
                    )
                    scores.append(np.where(seen, np.exp(one), 0))
                    values.append(linear(f"{name}.v_proj", read)[:, shared])
                weights = np.concatenate(scores, axis=1)
                weights /= weights.sum(-1, keepdims=True)
                heads.append(weights @ np.concatenate(values))
            return linear(f"{name}.o_proj", np.concatenate(heads, axis=-1))

        alone = f"{layer}.input_layernorm.weight" in w  # a Gemma's names, or a T5Gemma's
        before, after = (
            ("input", "post_attention") if alone else ("pre_self_attn", "post_self_attn")
        )
        inputs = scaled(f"{before}_layernorm", x)
        sources = [(inputs, seen, True)] + [(encoded, True, False)] * merged
        x = x + scaled(f"{after}_layernorm", attend("self_attn", inputs, sources))
        if encoded is not None and not merged:
            inputs = scaled("pre_cross_attn_layernorm", x)
            mixed = attend("cross_attn", inputs, [(encoded, True, False)])
            x = x + scaled("post_cross_attn_layernorm", mixed)
        inputs = scaled("pre_feedforward_layernorm", x)
        inner = gelu(linear("mlp.gate_proj", inputs)) * linear("mlp.up_proj", inputs)
        x = x + scaled("post_feedforward_layernorm", linear("mlp.down_proj", inner))
    return norm(x, w[f"{place}.norm.weight"])
