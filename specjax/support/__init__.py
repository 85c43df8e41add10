"""What all modules lean on: files, names, ranges, the compilation cache."""
