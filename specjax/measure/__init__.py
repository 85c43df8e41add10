"""What is measured: acceptance, costs, speedups, quality; and how it is shown."""
