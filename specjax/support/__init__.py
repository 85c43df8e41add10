"""Helpers of all modules: files, names, ranges, flags, processes, the compilation cache."""
