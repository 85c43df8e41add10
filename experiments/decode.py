"""`specjax decode` from a checkout: decode the lines of a file.

    python -m experiments.decode --config=configs/decode.py \\
        --config.target=DIR --config.draft=DIR --input=FILE --output=OUT.jsonl
"""

from specjax.cli import decode

if __name__ == "__main__":
    decode.run()
