"""Two versions of specjax on the same models, inputs and keys: tokens, time and compilation."""
