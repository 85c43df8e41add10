"""The paper on a family of models: its tables and figures, measured, beside its own numbers.

    python -m experiments.reproduce --config=configs/embedded.py:demo --workdir=runs/embedded

What is made is up to the config's `tables`, in this order (`study.py` has what they share):

    alpha     Table 3: α of every draft, n-grams included, over prefixes of the target's
    speedup   Tables 2 and 4: c, v(γ), the best γ, predicted speedups and the measured one, batch 1
    lenience  Table 5: α and acceptance under lenience
    quality   whether both methods' outputs are equally good: BLEU, ROUGE or exact outputs

and Figure 1 and Figure 5 from one output. With --config.tree Figure 1 is of trees; all else is the
paper's, and of chains. Table 1 and Figures 2 to 4 need no models: `experiments.theory`.
Writes results.jsonl (a row for each cell and figure), report.md and figures to the workdir. A run
that was cut off goes on where it was. With --nomeasure nothing is measured and no model loaded:
report and figures are made of the rows that are there.

With --config.mesh=model=8 eight devices share the target. Devices of several processes need the
same command in each, with --coordinator=HOST:PORT --processes=N --process=I, or --coordinator=auto
on a cluster that jax knows. The workdir is the first's.
"""
