"""One run's steps: loop, gradient, optimizer, schedule, evaluation, and on which engine they run."""
