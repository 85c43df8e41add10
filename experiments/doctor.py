"""`specjax doctor` from a checkout: what is wrong with a pair.

    python -m experiments.doctor --config=configs/decode.py \\
        --config.target=DIR --config.draft=DIR [--input=FILE]
"""

from specjax.cli import doctor

if __name__ == "__main__":
    doctor.run()
