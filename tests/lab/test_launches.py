"""Operations of a round, read off compiled programs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import command_line
from command_line import ROOT
from experiments.launches import programs
from experiments.launches.programs import Part, Work
from specjax import checkpoints, decoding
from specjax.sampling import Sampling

PROGRAM = """\
HloModule jit_decode

FileNames
1 "/site/jax/_src/loops.py"
2 "/mine/speculative.py"

FunctionNames
1 "while_loop"
2 "Method.decode"
3 "draft_chain"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=2 function_name_id=2 line=2}
3 {file_name_id=2 function_name_id=3 line=3}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=1}
3 {file_location_id=1 parent_frame_id=1}
4 {file_location_id=1 parent_frame_id=2}

%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %add.1 = f32[2]{0} add(%p, %p)
}

%less (t: (s32[], /*index=1*/f32[2])) -> pred[] {
  %t = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  ROOT %below = pred[] fusion(%n), kind=kLoop, calls=%fused
}

%token (t: (s32[], /*index=1*/f32[2])) -> (s32[], f32[2]) {
  %t = (s32[], /*index=1*/f32[2]{0}) parameter(0)
  %one = (s32[], f32[2]{0:T(128)}) fusion(%t), kind=kLoop, calls=%fused
  %two = f32[2]{0} copy(%one)
  ROOT %r = (s32[], f32[2]{0}) tuple(%one, %two)
}

%drafts (t: (s32[], f32[2])) -> (s32[], f32[2]) {
  %t = (s32[], f32[2]{0}) parameter(0)
  %first = f32[2]{0} custom-call(%t), custom_call_target="gemm"
  ROOT %w = (s32[], f32[2]{0}) while(%t), condition=%less, body=%token, metadata={stack_frame_id=4}
}

%nothing (t: (s32[], f32[2])) -> (s32[], f32[2]) {
  ROOT %t = (s32[], f32[2]{0}) parameter(0)
}

%round (t: (s32[], f32[2])) -> (s32[], f32[2]) {
  %t = (s32[], f32[2]{0}) parameter(0)
  %begun = f32[2]{0} fusion-start(%t), calls=%fused
  %done = f32[2]{0} fusion-done(%begun)
  %c = (s32[], f32[2]{0}) conditional(%n, %t, %t), CHOICE, metadata={stack_frame_id=2}
  %v = (s32[], f32[2]{0}) while(%c), condition=%less, body=%token, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %g = (s32[], f32[2]{0}) call(%v), to_apply=%token
}

ENTRY %main (a: f32[2]) -> (s32[], f32[2]) {
  %a = f32[2]{0} parameter(0)
  ROOT %l = (s32[], f32[2]{0}) while(%a), condition=%less, body=%round, metadata={stack_frame_id=3}
}
"""


@pytest.mark.parametrize(
    "choice",
    [
        "branch_computations={%drafts, %nothing}",
        "true_computation=%drafts, false_computation=%nothing",
    ],
)
def test_a_program_by_hand(choice):
    """A round: 1 + 2 operations and a condition, 3 turns of 2 whose number is known; a draft: 1
    and 3 for each token after the first, conditions included."""
    chain = Part("loop", "draft_chain", 3, ())
    drafting = Part("branch", "draft_chain", 1, (chain,))
    either = Part("choice", "draft_chain", 0, (drafting, Part("branch", "draft_chain", 0, ())))
    known = Part("loop", "", 2, (), 3)
    round_ = programs.read(PROGRAM.replace("CHOICE", choice)).loop("decode")
    assert round_ == Part("loop", "decode", 4, (either, known))
    assert programs.of_round(round_, 0) == Work(10, 2)  # is a row alive, and does one draft
    assert programs.of_round(round_, 1) == Work(11, 3)
    assert programs.of_round(round_, 4) == Work(20, 6)
    assert programs.read(PROGRAM.replace("CHOICE", choice)).loop("draft_chain") == chain
    with pytest.raises(ValueError, match="of 'speculate'"):
        round_.loop("speculate")


def test_a_program_of_this_machine():
    """A loop with a known number of turns, one without, and a choice; the second loop has an
    operation more."""

    @jax.jit
    def program(x, n):
        def known(i, x):
            return jnp.sort(x)

        def unknown(x):
            return jnp.sort(jnp.sort(x)[::-1])

        x = jax.lax.fori_loop(0, 3, known, x)
        x = jax.lax.while_loop(lambda x: x[0] < n, unknown, x)
        return jax.lax.cond(n > 2, jnp.sort, lambda x: x, x)

    found = programs.read(program.lower(jnp.arange(8.0), jnp.float32(0)).compile().as_text())
    assert found.kind == "program"
    shape = [(part.kind, part.turns) for part in found.parts]
    assert sorted(shape, key=str) == [("choice", None), ("loop", 3), ("loop", None)]
    loops = {part.turns: part.operations for part in found.parts if part.kind == "loop"}
    assert loops[None] > loops[3] >= 1


def test_command(monkeypatch, capsys):
    """For this machine, which needs no plugin: what decides more hands over more."""
    args = ["--platform=cpu", "--gamma=2", "--policy=constant", "--policy=lookahead"]
    args.append("--policy=specjax.tuning.counting:Undecided")
    out = command_line.run(monkeypatch, capsys, "experiments.launches", *args)
    rows = [line.split("│")[1:-1] for line in out.stdout.splitlines() if "│" in line]
    plain = [cell.strip() for cell in rows.pop(0)]
    counts = {name.strip(): [int(count) for count in row] for name, *row in rows}
    assert list(counts) == ["constant", "lookahead", "Undecided"]
    assert (plain[0], *plain[2:4]) == ("plain", "–", "–")
    assert 0 < int(plain[1]) < counts["Undecided"][0]
    for none, one, two, reads in counts.values():
        assert 0 < none < one < two
        assert reads > 2
    both = zip(counts["lookahead"][:3], counts["Undecided"][:3], strict=True)
    assert all(more > less for more, less in both)


@pytest.mark.parametrize("cache", [None, "int8"])
@pytest.mark.parametrize("rows", [1, 3])
def test_no_cache_is_copied_on_a_gpu(rows, cache):
    """Neither in plain decoding nor in a round with narrower passes; no GPU is needed."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax's plugin for CUDA is not installed")
    family = checkpoints.described(ROOT / "families/prose/draft").config
    model = checkpoints.shapes(family, dtype=jnp.bfloat16, cache=cache, platform="gpu")
    both = checkpoints.Checkpoint("prose", model, family, eos_ids=(1,))
    options: dict[str, Any] = {"gamma": 3, "sampling": Sampling(1.0), "policy": "svip"}
    for method in (
        decoding.build(both, None, gamma=3, sampling=Sampling(1.0)),
        decoding.build(both, both, widths=(1, 2), **options),
    ):
        text = programs.compiled(method, both, 32, max_new_tokens=75, platform="cuda", rows=rows)
        # A cache, of 5 heads of 16 and three digits of slots, comes out of updates alone: a copy
        # may hide in a fusion, which XLA names after its last operation.
        cache_of = rf"\[{rows},5,(?:16,\d{{3}}|\d{{3}},16)\]"
        made = rf"^ +(?:ROOT )?%(\S+) = [^=]*{cache_of}[^=]* (?:fusion|copy|copy-start)\("
        names = re.findall(made, re.sub(r"/\*.*?\*/", "", text), re.MULTILINE)
        assert len(names) >= 2
        assert all("update_slice" in name or "scatter" in name for name in names), names
