"""Readers of formats other than safetensors; only `specjax.checkpoints` imports them.

Each file is read without the library that wrote it, in bounded memory, and runs nothing.

- `torch_files`, `pickles`: what `torch.save` writes
- `msgpack_files`: flax
- `t5x_files`: T5X's folders, and the config that they lack
- `gguf_files`, `gguf_models`, `gguf_tokenizers`: llama.cpp's one file for all
- `spiece`: sentencepiece's tokenizer of a T5
"""
