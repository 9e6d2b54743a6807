"""Where a sweep's loss is lowest, and laws through optima."""
