"""The MoE transformer family: one config, one forward pass, one loss, exact parameter and FLOP counts."""
