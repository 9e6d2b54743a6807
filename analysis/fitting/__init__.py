"""Laws, the solver, intervals, and what a fit rests on."""
