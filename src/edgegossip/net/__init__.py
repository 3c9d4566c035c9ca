"""Real machines: transport, validation of input, membership, security and host."""
