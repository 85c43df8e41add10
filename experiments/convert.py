"""Write a checkpoint of any format as safetensors.

    python -m experiments.convert SOURCE DIRECTORY

docs/checkpoints.md says what SOURCE can be.
"""

from specjax.cli.convert import main

if __name__ == "__main__":
    main()
