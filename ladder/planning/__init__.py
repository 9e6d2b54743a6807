"""What a family will be and need, before anything runs: shapes, memory, drops that compare."""
