"""Published EAGLE heads against the package that writes them, vllm-project/speculators: both read
one random Llama, and say the same of one text. EAGLE-1 has gone from the package after 0.3.0."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagles import features_of, target_of
from specjax import checkpoints, drafters
from test_published import IDS, LLAMA, ROWS, E, V, said

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("speculators")
TAPS = (1, 0, 1)  # of a target of two layers


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """The target as a directory, which both read."""
    place = tmp_path_factory.mktemp("verifier")
    checkpoints.save(place, target_of("llama", V))
    return str(place)


def config_of(kind, make, verifier, attention, changes, **options):
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**{**LLAMA, **changes}, head_dim=2)
    layer._attn_implementation = attention
    return make(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig()],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )


def drawn(parameters):
    """Weights that say something; the verifier's own are left alone."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in parameters:
            if not name.startswith(("embed_tokens", "verifier")) and "rotary" not in name:
                parameter.normal_(generator=generator).add_(float(parameter.ndim == 1))


def one(verifier, layers):
    """An EAGLE-1, and a function of tokens and the target's states that gives its logits."""
    models = pytest.importorskip("speculators.models.eagle")
    from transformers import LlamaForCausalLM

    # It turns by its target's rotary embedding, whatever its own config says.
    own = {"num_hidden_layers": layers, "rope_theta": 10000.0}
    config = config_of(
        "eagle", models.EagleSpeculatorConfig, verifier, "sdpa", own, fusion_bias=True
    )
    model = models.EagleSpeculator(config, None, "detached")
    drawn(model.named_parameters())
    # Later: what is attached when it is made has its head tied to its embedding.
    model.attach_verifier(LlamaForCausalLM.from_pretrained(verifier), "train_only")

    def call(tokens, states, positions):
        return model(tokens, states[-1], position_ids=positions, return_dict=False)

    return model, call


def three(verifier, residual_normed):
    """An EAGLE-3, likewise; its forward pass trains, so the logits are taken from its head."""
    import torch
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = config_of(
        "eagle3", Eagle3SpeculatorConfig, verifier, "simple_flex_attention", {},
        draft_vocab_size=ROWS, eagle_aux_hidden_state_layer_ids=list(TAPS),
        norm_before_residual=residual_normed,
    )  # fmt: skip
    ids = torch.tensor(IDS - np.arange(ROWS))
    model = Eagle3DraftModel(config, torch.tensor(np.isin(np.arange(V), IDS)), ids)
    drawn(model.named_parameters())

    def call(tokens, states, positions):
        seen = []
        with (
            torch.compiler.set_stance("force_eager"),
            model.lm_head.register_forward_hook(lambda *args: seen.append(args[2])),
        ):
            taps = torch.cat([states[tap] for tap in TAPS], dim=-1)
            model(taps, tokens, position_ids=positions, ttt_steps=1)
        logits = torch.full((len(tokens), tokens.shape[1], V), -torch.inf)
        logits[..., torch.tensor(IDS)] = seen[0]
        return logits

    return model, call


MADE = {
    "EAGLE-1": lambda verifier: one(verifier, 1),
    "EAGLE-1, which says its target's number of layers": lambda verifier: one(verifier, 2),
    "EAGLE-3": lambda verifier: three(verifier, False),
    "EAGLE-3, norm_before_residual": lambda verifier: three(verifier, True),
}


@pytest.mark.parametrize("name", MADE)
def test_logits_are_those_of_speculators(name, verifier, tmp_path):
    """At every slot but the first, from features that each package computes itself."""
    import torch
    from transformers import LlamaForCausalLM

    model, call = MADE[name](verifier)
    model.save_pretrained(tmp_path)
    drafter = drafters.load(str(tmp_path), target_of("llama", V))
    tokens = np.random.default_rng(1).integers(0, V, (1, 9), np.int32)
    with torch.no_grad():
        ids = torch.tensor(tokens.astype(np.int64))
        states = LlamaForCausalLM.from_pretrained(verifier)(ids, output_hidden_states=True)
        before = [state[:, :-1] for state in states.hidden_states]
        expected = call(ids[:, 1:], before, torch.arange(1, 9)[None]).reshape(8, V).numpy()
    hidden = features_of(drafter, np.zeros((1, 0), np.int32), np.zeros(1, np.int32), tokens)
    assert hidden.shape[-1] == (E if "EAGLE-1" in name else 4 * E)
    found = np.asarray(said(drafter, jnp.asarray(tokens), jnp.asarray(hidden)))[0, 1:]
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    assert np.ptp(expected[finite]) > 1
    scale = np.abs(expected[finite]).max()
    np.testing.assert_allclose(found[finite], expected[finite], rtol=1e-4, atol=1e-5 * scale)
