"""Loading and converting take hardly more memory than the parameters, in every format.

`pytest -m slow tests/io/test_checkpoint_memory.py -s` prints a table by format.
"""

import dataclasses
import subprocess
import sys
import textwrap

import pytest

import checkpoint_formats as formats
import t5_variants
from command_line import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]
V1_1 = t5_variants.VARIANTS["v1_1"]
BASE = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_heads": 12, "vocab_size": 32128}
BASE |= {"num_layers": 12, "num_decoder_layers": 12, "relative_attention_num_buckets": 32}
SMALL = {"relative_attention_max_distance": 128}
CHUNK = 16_064  # rows of the embedding: T5X divides what is larger than 64 MiB until it is not
PROGRAM = """
    import pathlib, re, sys
    from specjax import checkpoints
    from specjax.models import memory

    def kilobytes(field):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(rf"{field}:\\s+(\\d+)", status)[1])

    action, small, big, out = sys.argv[1:]
    convert = lambda place: checkpoints.convert(place, out, overwrite=True)
    act = checkpoints.load if action == "load" else convert
    act(small)
    before = kilobytes("VmRSS")
    model = act(big).model
    print(memory.nbytes(model), 1024 * (kilobytes("VmHWM") - before))
"""


def write(directory, sizes, form):
    """A T5 v1.1 in float32 of these sizes."""
    variant = dataclasses.replace(V1_1, config={**V1_1.config, **sizes})
    arrays = t5_variants.tensors(variant)
    if form == "t5x":
        return formats.write_t5x(directory, arrays, chunk=CHUNK)
    t5_variants.write(directory, variant)
    return directory if form == "safetensors" else formats.rewrite(directory, arrays, form)


@pytest.mark.parametrize("form", ["safetensors", "bin", "legacy", "flax", "t5x"])
def test_a_t5_v1_1_base_of_990_megabytes(form, tmp_path, capsys):
    """VmHWM of a process that has loaded a tiny model before, which pays for imports."""
    small = write(tmp_path / "small", SMALL, form)
    big = write(tmp_path / "big", BASE, form)
    for action, bound in (("load", 1.2), ("convert", 0.5)):
        program = [sys.executable, "-c", textwrap.dedent(PROGRAM), action]
        arguments = [*program, small, big, tmp_path / "out"]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        params, peak = map(int, done.stdout.split())
        with capsys.disabled():
            print(f"\n{form} {action}: {params / 1e6:.0f} MB, peak {peak / params:.3f}")
        assert params > 500e6
        assert (0.9 if action == "load" else 0.0) < peak / params < bound
