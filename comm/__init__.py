"""Moves tokens between ranks: expert transports, capacities and honest drop accounting."""
