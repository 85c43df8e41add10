"""The families of models and what each can do: the table of docs/checkpoints.md as values.

A family that enters the package is a line in `ROWS` and a row in the table. Tests are parametrized
over `cells`, and tests/lab/test_family_table.py compares the table with both.
"""

from types import ModuleType
from typing import NamedTuple

import pytest

import gemma_variants
import gpt_variants
import llama_variants
import t5_variants
import t5gemma_variants

# The columns of the table, and the test that has a case for each of their cells.
CORE, TORCH = "core/test_families.py", "torch/test_families_torch.py"
LOOPS = f"{CORE}::test_greedy_tokens_are_plain_decodings"
COLUMNS = {
    **dict.fromkeys(("load", "save"), "io/test_hub.py::test_what_is_saved_is_loaded"),
    "logits": f"{TORCH}::test_logits_are_those_of_transformers",
    "greedy": f"{TORCH}::test_greedy_tokens_are_those_of_transformers",
    **dict.fromkeys(("trees", "admission", "int8", "packed", "EAGLE", "early exit"), LOOPS),
    "mesh": f"{CORE}::test_a_mesh_decodes_the_tokens_of_one_device",
    "GGUF": f"{CORE}::test_gguf_gives_the_same_parameters",
}


class Row(NamedTuple):
    """A family: a variant that stands for it, and the columns in which it has a dash."""

    variants: ModuleType
    variant: str
    lacks: tuple[str, ...] = ()

    @property
    def made(self):
        """The variant."""
        others = getattr(self.variants, "OTHERS", {})
        return {**self.variants.VARIANTS, **others}[self.variant]

    def write(self, directory):
        """Write the variant's checkpoint."""
        return self.variants.write(directory, self.made)


ROWS = {
    "T5 1.0": Row(t5_variants, "v1_0"),
    "T5 1.1": Row(t5_variants, "v1_1"),
    "mT5": Row(t5_variants, "mt5"),
    "umT5": Row(t5_variants, "umt5"),
    "ByT5": Row(t5_variants, "byt5", lacks=("GGUF",)),
    "GPT-2": Row(gpt_variants, "untied"),
    "Llama": Row(llama_variants, "llama3"),
    "Mistral": Row(llama_variants, "mistral"),
    "Qwen 2": Row(llama_variants, "qwen2"),
    "Qwen 3": Row(llama_variants, "qwen3"),
    "Gemma 2": Row(gemma_variants, "gemma2"),
    "Gemma 3": Row(gemma_variants, "gemma3_untied"),
    "T5Gemma": Row(t5gemma_variants, "t5gemma", lacks=("GGUF",)),
    "T5Gemma 2": Row(t5gemma_variants, "t5gemma2", lacks=("GGUF",)),
}


def cells(*columns: str, quick: set[tuple[str, str]]) -> list:
    """Cases (row, column) of a parametrized test, for all cells without a dash.

    Args:
      quick: cells that `make test` runs; `make slow` runs the rest.
    """
    return [
        pytest.param(
            *(name, column),
            id=f"{name}-{column}",
            marks=[] if (name, column) in quick else [pytest.mark.slow],
        )
        for name, row in ROWS.items()
        for column in columns
        if column not in row.lacks
    ]
