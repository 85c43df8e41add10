"""How the embedded families and the acceptance heads are trained."""
